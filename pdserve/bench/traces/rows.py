"""The lines that a trace can have: as strict as is needed to know what they ask for, in the form of their origin."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_Tokens = Annotated[int, Field(gt=0, strict=True)]
_Milliseconds = Annotated[float, Field(ge=0)]
_Id = Annotated[str, Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class LoggedMessage(_Row):
    """Of the OpenAI form, passed on as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: str

    @property
    def text(self) -> str:
        """All of it that a chat template may show."""
        shown = {name: value for name, value in (self.__pydantic_extra__ or {}).items() if value}
        content = shown.pop("content", "")
        return f"{self.role}:{content}{shown or ''}\n"


class MooncakeRow(_Row):
    """A request of the Mooncake trace: lengths and ids of blocks, or a text. AIPerf adds sessions and delays."""

    session_id: _Id | None = None
    input_length: _Tokens | None = None
    text_input: Annotated[str, Field(min_length=1)] | None = None
    output_length: _Tokens | None = None
    hash_ids: list[int] | None = None
    delay: _Milliseconds | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> MooncakeRow:
        if (self.input_length is None) == (self.text_input is None):
            raise ValueError("a line has either input_length or text_input")
        if self.hash_ids is not None and self.input_length is None:
            raise ValueError("hash_ids need input_length")
        return self


class ConversationTurn(_Row):
    """What a user says."""

    text: Annotated[str, Field(min_length=1)]
    role: str | None = None
    output_length: _Tokens | None = None
    delay: _Milliseconds | None = None


class ConversationRow(_Row):
    """A session: each turn follows the model's own answer to the one before."""

    session_id: _Id | None = None
    turns: Annotated[list[ConversationTurn], Field(min_length=1)]


class Fork(_Row):
    """A session that continues this one, beside it."""

    child: _Id
    background: bool = False


class Spawn(_Row):
    """Sub-agents that start here, and the turn that waits for them."""

    children: Annotated[list[_Id], Field(min_length=1)]
    join_at: int | None = None


class AgentTurn(_Row):
    """Messages that are added, and the sub-agents that follow the answer."""

    model_config = ConfigDict(extra="allow", frozen=True)

    messages: Annotated[list[LoggedMessage], Field(min_length=1)]
    max_tokens: _Tokens | None = None
    forks: list[_Id | Fork] = []
    spawns: list[_Id | Spawn] = []


class AgentRow(_Row):
    """A session of AIPerf's `dag_jsonl`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    session_id: _Id
    turns: Annotated[list[AgentTurn], Field(min_length=1)]
    pre_session_spawns: list[_Id] = []

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("orchestrator"):
            raise ValueError("sessions without requests (orchestrator) are not read")
        return data


class MessagesRow(_Row):
    """A request of the OpenAI API, or a whole conversation with the answers in it."""

    messages: Annotated[list[LoggedMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    session_id: _Id | None = None
    output_length: _Tokens | None = None
    delay: _Milliseconds | None = None
