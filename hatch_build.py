"""Keep the seam manifests out of the editable wheel: there the checkout's own are read."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableHook(BuildHookInterface[Any]):
    """Gives an editable install the ``.pth`` only."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each wheel; `version` is 'standard' or 'editable'."""
        if version == "editable":
            build_data["force_include_editable"] = {"autopatch.pth": "kvcached_patch.pth"}
