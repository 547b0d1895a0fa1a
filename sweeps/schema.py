"""The JSON Schema of sweep files: editors complete keys and underline mistakes with it."""

from typing import Any

from ..trainables import registry
from .scoring import FREE
from .searchers import SEARCHERS
from .settings import SweepSettings
from .validation import all_keys

_NUMBER = r"^[-+]?[0-9._]+([eE][-+]?[0-9]+)?([kMGT]B|[KMGT]iB|[kMB%smhd])?$|^=.*"


def sweep_schema() -> dict[str, Any]:
    """One schema for every trainable: `base` and the keys of `search` follow from `trainable`."""
    schema = SweepSettings.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "rigsweep sweep"
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    schema["properties"]["trainable"] = {"enum": registry.names()}
    schema["properties"]["searcher"] |= {"enum": list(SEARCHERS)}
    schema["required"] = []
    schema["allOf"] = [{"if": {"required": ["from"]}, "then": _FROM, "else": {"required": ["trainable", "base"]}}]
    for name in registry.names():
        model = registry.settings_class(name)
        base = model.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(base.pop("$defs", {}))
        definitions[model.__name__] = base
        searched = {key: {"$ref": "#/$defs/Dimension"} for key in all_keys(model)}
        schema["allOf"].append(
            {
                "if": {"properties": {"trainable": {"const": name}}, "required": ["trainable"]},
                "then": {
                    "properties": {
                        "base": {"$ref": f"#/$defs/{model.__name__}"},
                        "search": {"type": "object", "properties": searched, "additionalProperties": False},
                    }
                },
            }
        )
    definitions["Dimension"] = _DIMENSION
    return with_units(schema)


_FROM: dict[str, Any] = {
    "properties": {
        "base": {
            "type": "object",
            "properties": {key: {} for key in FREE},
            "additionalProperties": False,
        },
        "search": {"type": "object", "additionalProperties": False, "patternProperties": {r"^sampling\.": {}}},
    }
}
"""What a sweep `from` a run may change of it."""
_WHEN = {"type": "object", "description": "The dimension exists only where these keys have these values."}
_DIMENSION: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "low": {"type": "number"},
                "high": {"type": "number"},
                "log": {"type": "boolean"},
                "step": {"type": "number"},
                "when": _WHEN,
            },
            "required": ["low", "high"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"choices": {"type": "array", "minItems": 1}, "when": _WHEN},
            "required": ["choices"],
            "additionalProperties": False,
        },
        {"type": "string", "pattern": "^=", "description": "A derived value: = 32 * model.layers"},
    ]
}


def with_units(node: Any) -> Any:
    """A schema in which numbers may also be written 400k, 10%, 2h, 16GB, or be derived: to an editor, text."""
    if isinstance(node, list):
        return [with_units(item) for item in node]
    if not isinstance(node, dict):
        return node
    changed = {key: with_units(value) for key, value in node.items()}
    if changed.get("type") in ("number", "integer"):
        described = {key: changed.pop(key) for key in ("title", "description", "default") if key in changed}
        return {**described, "anyOf": [changed, {"type": "string", "pattern": _NUMBER}]}
    return changed
