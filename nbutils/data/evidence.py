"""What so many held-out rows can prove: the limits that lesson 04 judges by, so that lesson 02 can tell them first."""

from __future__ import annotations

import math

from nbutils.language import tr

DECIDING = ("exact_content", "content")  # the scores that decide whether a training helped
ALPHA = 0.05 / len(DECIDING)  # Bonferroni: two chances to rise by luck, so p of each must be smaller
# If n answers turn right and none wrong, the exact paired test (McNemar's) gives p = 2 / 2**n, and never less. The
# t-test of lesson 04 has no such limit: where two rows change alike, it is certain.
LEAST_TURNED = math.floor(math.log2(2 / ALPHA)) + 1
LEAST_ROWS = LEAST_TURNED + 1  # below: no verdict; one answer may be right before, or stay wrong
FEW_ROWS = 20  # below: a warning, as intervals are rough


def remark(rows: int) -> str:
    """What so few held-out rows can prove, and what to do; nothing where they are enough, or none are left."""
    if not 0 < rows < FEW_ROWS:
        return ""
    return tr(
        "[WARN] held-out rows: {rows}. {turned} answers have to turn right, and none wrong, before luck is ruled out "
        "(exact paired test, p < {alpha}); below {least} rows lesson 04 gives no verdict. "
        "To do: add rows; or train on fewer and hold out more ({few} or more in a file of their own: EVAL_DATA of "
        "lesson 02); or cross-validation: train several times, each time with other rows in EVAL_DATA and another "
        "RUN_NAME, and count the right answers of all runs together.",
        rows=rows,
        turned=LEAST_TURNED,
        alpha=ALPHA,
        least=LEAST_ROWS,
        few=FEW_ROWS,
    )
