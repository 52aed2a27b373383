"""GLM's marks of reasoning and tool calls: single tokens that stand in the text of an answer."""

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"

MARKS = (THINK, END_THINK, CALL, END_CALL, KEY, END_KEY, VALUE, END_VALUE)
