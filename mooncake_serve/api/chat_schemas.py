"""The parts of a chat request: messages, tools, and what form the answer must have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
CALL_ID_CHARS_MAX = 128

CallId = Annotated[str, Field(min_length=1, max_length=CALL_ID_CHARS_MAX)]


class Part(BaseModel):
    """Base of every part."""

    model_config = ConfigDict(extra="forbid")


class TextPart(Part):
    """A piece of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Part):
    """The function of an earlier call; `arguments` is a JSON object, as text."""

    name: str = Field(pattern=FUNCTION_NAME)
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, value: str) -> str:
        try:
            parsed = json.loads(value or "{}")
        except (ValueError, RecursionError) as err:
            raise ValueError("arguments must be a JSON object, as text") from err
        if not isinstance(parsed, dict):
            raise ValueError("arguments must be a JSON object, as text")
        return value or "{}"


class ToolCall(Part):
    """A call the assistant made earlier."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128)
    tool_call_id: CallId | None = None
    refusal: None = None

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Message:
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("tool_calls is only allowed in an assistant's message")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs in a tool's message, and only there")
        if self.content is None and not self.tool_calls:
            raise ValueError("content may be null only beside tool_calls")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Part):
    """What may be called; `parameters` is a JSON schema."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted, and always on: arguments follow the schema by construction."""


class Tool(Part):
    """A function the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Part):
    """A function by its name."""

    name: str = Field(pattern=FUNCTION_NAME)


class NamedChoice(Part):
    """This function must be called."""

    type: Literal["function"]
    function: ChosenFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class AnyText(Part):
    """No constraint."""

    type: Literal["text"]


class AnyObject(Part):
    """The answer is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(Part):
    """A JSON schema and its name."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool | None = None
    """Accepted, and always on."""


class OfSchema(Part):
    """The answer is JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyText | AnyObject | OfSchema, Field(discriminator="type")]
