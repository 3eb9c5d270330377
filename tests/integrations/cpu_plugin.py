"""A plugin of axolotl for tests: of several processes each would put its model on an accelerator's device."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class CpuPlugin(BasePlugin):
    """The plugin: it leaves models on the CPU."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = {"": "cpu"}
