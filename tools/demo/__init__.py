"""Where the `demo` preset comes from: the text it learned, and the training. No part of the product imports it."""
