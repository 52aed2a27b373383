import sys

from glm52_operator.cli import main

sys.exit(main())
