"""Whether the plugin would be active and right in an environment, and why not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvcached_patch import __version__, _startup, config
from kvcached_patch.doctor import environment, library, live
from kvcached_patch.doctor.report import Diagnosis, text

__all__ = ["Diagnosis", "diagnose", "text"]


def diagnose(*, probe: bool = True, arguments: Sequence[str] = ()) -> Diagnosis:
    """Examine this interpreter's environment.

    probe: also import vLLM, in a child process. arguments: what would follow ``vllm serve``; they
    are judged only where vLLM is imported.
    """
    result = Diagnosis()
    result.add("python", f"{sys.version.split()[0]} ({sys.executable})")
    result.add("kvcached-patch", f"{__version__} ({Path(_startup.__file__).parent})")
    mode = environment.toggle(result)
    environment.doors(result, asked=mode is not config.Mode.OFF)
    verdicts = [
        verdict
        for package, label in _startup.TARGETS.items()
        if (verdict := library.target(result, package, label))
    ]
    vllm = next((v for v in verdicts if v.statuses and v.installed.package == "vllm"), None)
    environment.command(result)
    for verdict in verdicts:
        library.other_plugins(result, verdict, told_live=probe)
    if mode is config.Mode.OFF:
        return result
    ready = probe and result.active
    environment.ledger(result)
    if vllm:
        environment.vllm_variables(result, vllm.installed.version)
    if arguments and not probe:
        result.note("configuration", "not judged: that takes an import of vLLM")
    if ready and vllm:
        live.vllm(result, vllm, arguments)
    elif ready:
        live.maxtext(result, verdicts)
    return result
