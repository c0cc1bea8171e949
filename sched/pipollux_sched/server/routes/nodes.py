"""Routes of nodes and of the cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pipollux_sched.server.dependencies import ControlDep, NeedsRole, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import Deciding, refusals
from pipollux_sched.store import NodeCondition
from pipollux_sched.views.cluster import list_nodes
from pipollux_sched.views.models import NodeDetails


class NodeChange(BaseModel):
    """The new condition of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    condition: Annotated[
        Literal["ready", "draining", "dead"], Field(description="'ready', 'draining' or 'dead'")
    ]
    reason: Annotated[
        str,
        StringConstraints(max_length=500, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f]*$"),
        Field(description="a text of one line and at most 500 characters"),
    ] = ""


router = APIRouter(
    tags=["nodes"], dependencies=[NeedsRole], responses=refusals(404, 413), route_class=JsonRoute
)


@router.get("/nodes", response_model=list[NodeDetails], summary="List nodes")
def nodes(store: StoreDep) -> list[NodeDetails]:
    """Return the nodes: slots and their jobs, condition, entry of the cluster file."""
    return list_nodes(store)


@router.put("/nodes/{name}", response_model=NodeDetails, summary="Set the condition of a node")
def set_node(name: str, store: StoreDep, control: ControlDep, node: NodeChange) -> NodeDetails:
    """Set a node `draining` (jobs leave), `dead` (jobs restart elsewhere) or `ready`."""
    control.set_node(name, NodeCondition(node.condition), node.reason)
    return next(found for found in list_nodes(store) if found.name == name)


@router.post("/decisions", status_code=202, response_model=Deciding, summary="Decide now")
def decide(control: ControlDep) -> dict[str, str]:
    """Run the allocator on all jobs now instead of at the next interval."""
    control.decide()
    return {"status": "deciding"}
