"""The guard: adaptation that does no harm, without labels. `Session(guard=...)` puts it around any method."""

from testtime.guard.settings import Guard as Guard
from testtime.types import Decision as Decision
