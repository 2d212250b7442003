"""What a model may call: Python functions with typed signatures.

Takes: functions, or "module:function" texts. Gives: JSON schemas; a ToolResult for every call.
"""

from treadle.tools.functions import Tool, ToolResult, Tools, load_tools, tool
from treadle.tools.importing import import_object

__all__ = ["Tool", "ToolResult", "Tools", "import_object", "load_tools", "tool"]
