"""Write the golden file anew: python -m tests.operator.renew_golden"""

from __future__ import annotations

import yaml

from glm52_operator.desired.children import build
from tests.operator.builders import target
from tests.operator.test_desired import GOLDEN

if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(yaml.safe_dump_all(build(target()), sort_keys=False, width=120))
