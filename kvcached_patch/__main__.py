"""``python -m kvcached_patch`` is the ``kvcached-patch`` command."""

import sys

from kvcached_patch.cli import main

sys.exit(main())
