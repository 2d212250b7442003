"""Messages <-> tokens, checked against the model's own chat template."""

from treadle.render.renderer import PrefixUnstable, Renderer
from treadle.render.report import Cell, TemplateReport
from treadle.render.template import ToolSpec
from treadle.render.tool_syntax import markers

__all__ = ["Cell", "PrefixUnstable", "Renderer", "TemplateReport", "ToolSpec", "markers"]
