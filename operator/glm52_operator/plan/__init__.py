"""Pure decisions: what may be written, what must be, what a specification that cannot work says."""
