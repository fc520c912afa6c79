from .labeling_arguments import LabelingOptions as LabelingOptions
from .private_labeler import PrivateLabeler as PrivateLabeler
from .run_summary import RunReport as RunReport
from .selection import (
    ClusterSelection as ClusterSelection,
)
from .selection import (
    FullSelection as FullSelection,
)
from .selection import (
    RandomSelection as RandomSelection,
)
from .selection import (
    Selector as Selector,
)
from .selection import (
    UncertainSelection as UncertainSelection,
)

__all__ = [
    "ClusterSelection",
    "FullSelection",
    "LabelingOptions",
    "PrivateLabeler",
    "RandomSelection",
    "RunReport",
    "Selector",
    "UncertainSelection",
]
