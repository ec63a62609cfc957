"""Reports as self-contained HTML pages: Jinja2 fills the templates, matplotlib draws the plots.

Both are in the extra `report`, and are imported only when a report is written. A page has no script
and refers to no outside resource; plots are embedded as SVG images.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"reference": "#7a8793", "second": "#2f6fdb", "candidate": "#d9730d"}


def require_report_packages() -> None:
    """Raise `ConfigurationError` unless the packages of the extra `report` are installed."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"a report needs {' and '.join(missing)}: pip install 'headrace[report]'"
        )


def render_page(template: str, **values: Any) -> str:
    """Return the page of a template in `headrace/tools/templates`. All values are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("headrace.tools", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(**values)


def new_plot() -> tuple[Figure, Axes]:
    """Return an empty plot with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def as_data_url(figure: Figure) -> str:
    """Return the figure as an SVG image in a `data:` URL."""
    import matplotlib

    target = io.BytesIO()
    # Text stays text, and equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(target.getvalue()).decode()
