"""Tool calls: read from the model's output, and forced by ``tool_choice``."""

from blocktable.serve.tools.choice import ToolUse, use_of_tools
from blocktable.serve.tools.formats import FORMATS, Reading, ToolCall, format_of_template

__all__ = ["FORMATS", "Reading", "ToolCall", "ToolUse", "format_of_template", "use_of_tools"]
