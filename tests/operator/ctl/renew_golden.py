"""Write the golden files anew: python -m tests.operator.ctl.renew_golden"""

from __future__ import annotations

from tests.operator.ctl.test_input import EXAMPLES, GOLDEN, golden, output

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for example in EXAMPLES:
        golden("plan", example).write_text(output("plan", example))
        if example.stem == "tiny":
            golden("render", example).write_text(output("render", example))
