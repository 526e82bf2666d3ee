"""The hits that plans expect of a pool of experts, before anything is known of a model's routing."""

from __future__ import annotations

import math

DEFAULT_HITS = (0.0, 0.33, 0.55, 0.7, 0.8, 0.87, 0.93, 0.97, 1.0)
"""Expected hit rates of pools of 0, 1/8, 2/8 ... of many experts. Measured with random models whose routing is as
skewed as that of trained ones."""

EVEN_EXPERTS, UNEVEN_EXPERTS = 8, 32
"""Experts of a layer up to which all are chosen about equally often, and from which some are chosen far more often than
others. Measured with models of 8, 32 and 64 experts: docs/benchmarks.md, "The matrix of settings"."""


def expected_hits(share: float, num_experts: int) -> float:
    """Return the share of the experts of a token that a pool is expected to hold.

    Args:
        share: the share of all experts that the pool has slots for; more than 1 is as good as 1.
        num_experts: experts of a layer.
    """
    share = min(1.0, share)
    at = share * (len(DEFAULT_HITS) - 1)
    low = min(int(at), len(DEFAULT_HITS) - 2)
    uneven = DEFAULT_HITS[low] + (at - low) * (DEFAULT_HITS[low + 1] - DEFAULT_HITS[low])
    even, many = math.log2(EVEN_EXPERTS), math.log2(UNEVEN_EXPERTS)
    unevenness = min(1.0, max(0.0, (math.log2(num_experts) - even) / (many - even)))
    return share + unevenness * (uneven - share)
