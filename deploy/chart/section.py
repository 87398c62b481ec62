"""What a section of the chart's values is made of: a frozen model whose fields are the keys, in camelCase.

Every field has a default and a description; both, and the bounds, go into values.yaml, values.schema.json and the
README. Values that Kubernetes defines (affinity, tolerations …) have the types of `deploy.chart.kubernetes_values`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Section(BaseModel):
    """Keys that belong together. Unknown ones are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, validate_default=True
    )
