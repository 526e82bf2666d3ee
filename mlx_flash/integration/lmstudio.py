"""For programs that embed mlx-lm, such as LM Studio's mlx-engine: the patch under the name their guides use.

They load through ``mlx_lm.utils.load``, which the patch reaches; see docs/clients.md.
"""

from mlx_flash.integration.mlx_lm import FlashPatch, apply_flash_patch, remove_flash_patch

__all__ = ["FlashPatch", "apply_flash_patch", "remove_flash_patch"]
