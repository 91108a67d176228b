"""The planner: what a deployment costs, from a model's configuration alone."""

from __future__ import annotations

from blocktable.plan.planner import Plan, PlanOptions, plan
from blocktable.plan.render import as_json, plot, render

__all__ = ["Plan", "PlanOptions", "as_json", "plan", "plot", "render"]
