"""`langgraph`: a graph of a model and its tools, with `langchain-openai` as the client."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from torchtitan_rl import AgentCall
from torchtitan_rl.experiments.agent_libraries.exercise import INSTRUCTIONS, MAX_REQUESTS, Exercise


async def solve(call: AgentCall, exercise: Exercise) -> str | None:
    tools = [tool(exercise.calculator, parse_docstring=True)]
    client = ChatOpenAI(model=call.model, base_url=call.base_url, api_key=call.api_key)
    model = client.bind_tools(tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([("system", INSTRUCTIONS), *state["messages"]])]}

    graph = StateGraph(MessagesState).add_node("model", ask).add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition)
    solver = graph.add_edge("tools", "model").compile()
    state: dict[str, Any] = {"messages": []}
    message: str | None = exercise.question
    try:
        while message is not None:
            state = {"messages": [*state["messages"], ("user", message)]}
            state = await solver.ainvoke(state, {"recursion_limit": 2 * MAX_REQUESTS})
            said = str(state["messages"][-1].text)
            message = exercise.reply(said)
    except GraphRecursionError:
        return None
    return said
