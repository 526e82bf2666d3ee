"""``DiskKVCache``, under the name of its module in other programs."""

from mlx_flash.kv.kvpool import DiskKVCache

__all__ = ["DiskKVCache"]
