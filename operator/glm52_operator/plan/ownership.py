"""May an object that exists under a child's name be written?"""

from __future__ import annotations

import enum

from glm52_operator import names
from glm52_operator.desired.target import Object, Target


class Ownership(enum.Enum):
    OURS = "ours"
    LEAVING = "leaving"
    FOREIGN = "foreign"


def ownership(observed: Object, target: Target) -> Ownership:
    """Ours: controlled by this very object, or an orphan that carries our labels.

    Leaving: of an object of the same name that was deleted, or under deletion itself: the garbage collector needs a
    moment. Foreign: somebody else's, which is never taken over.
    """
    meta = observed["metadata"]
    controller = next((ref for ref in meta.get("ownerReferences", []) if ref.get("controller")), None)
    if controller is None:
        labels = meta.get("labels", {})
        ours = labels.get(names.MANAGED_BY) == names.MANAGER and labels.get(names.NAME) == target.name
        if not ours:
            return Ownership.FOREIGN
    elif controller["uid"] != target.uid:
        same_kind = controller["kind"] == names.KIND and controller["apiVersion"].startswith(f"{names.GROUP}/")
        return Ownership.LEAVING if same_kind and controller["name"] == target.name else Ownership.FOREIGN
    return Ownership.LEAVING if meta.get("deletionTimestamp") else Ownership.OURS
