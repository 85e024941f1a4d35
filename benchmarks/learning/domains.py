"""Prompts of different domains from templates. Every index has its own prompt, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import ConfigError

Conversation = list[dict[str, str]]

CITIES = [
    "Paris",
    "Berlin",
    "Madrid",
    "Rome",
    "Oslo",
    "Vienna",
    "Lisbon",
    "Prague",
    "Dublin",
    "Athens",
    "Cairo",
    "Lima",
    "Quito",
    "Tokyo",
]
PEOPLE = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Eva",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Karin",
    "Liam",
    "Mona",
    "Noah",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
GOODS = [
    "lamp",
    "chair",
    "kettle",
    "printer",
    "bicycle",
    "tent",
    "backpack",
    "monitor",
    "keyboard",
    "blender",
    "camera",
    "drill",
]
TABLES: Mapping[str, tuple[str, ...]] = {
    "orders": ("order_id", "customer_id", "total", "created_at", "status"),
    "customers": ("customer_id", "name", "city", "country", "signup_date"),
    "employees": ("employee_id", "name", "department", "salary", "hired_at"),
    "products": ("product_id", "title", "price", "stock", "category"),
    "invoices": ("invoice_id", "customer_id", "amount", "due_date", "paid"),
    "shipments": ("shipment_id", "order_id", "carrier", "weight", "shipped_at"),
}
TOPICS = [
    "how a bicycle stays upright",
    "why the sky is blue",
    "what inflation is",
    "how bread rises",
    "what a black hole is",
    "how vaccines work",
    "why leaves fall",
    "what the stock market does",
    "how glass is made",
    "why cats purr",
    "how to start running",
    "what makes a good story",
    "how a bridge carries load",
    "why we dream",
    "how tides arise",
    "what a computer virus is",
    "how coffee is grown",
    "why music moves us",
    "how to save water",
    "what democracy means",
]
READERS = [
    "a child",
    "a student",
    "a tourist",
    "a busy manager",
    "my grandmother",
    "a beginner",
    "an engineer",
    "a teacher",
]

TOOLS = """You call tools. Answer only with one JSON object. The tools are:
get_weather(city, day, unit)
create_event(title, person, day, hour)
place_order(product, quantity, city)
send_message(person, text)"""
TOOL_EXAMPLES = (
    (
        "What is the weather in Bern on Monday?",
        '{"name": "get_weather", "arguments": {"city": "Bern", "day": "Monday", "unit": "celsius"}}',
    ),
    (
        "Meet Olga on Friday at 9.",
        '{"name": "create_event", "arguments": '
        '{"title": "Meeting", "person": "Olga", "day": "Friday", "hour": 9}}',
    ),
    (
        "Order 2 clocks to Riga.",
        '{"name": "place_order", "arguments": {"product": "clock", "quantity": 2, "city": "Riga"}}',
    ),
)
SQL_EXAMPLES = (
    ("How many rows has orders?", "SELECT COUNT(*) AS number FROM orders;"),
    (
        "List name of customers, sorted by city, the first 5.",
        "SELECT name FROM customers ORDER BY city ASC LIMIT 5;",
    ),
)


def turns(system: str, examples: Sequence[tuple[str, str]], request: str) -> Conversation:
    """A conversation that shows what answers look like, and asks for another one."""
    shown = [
        {"role": role, "content": content}
        for pair in examples
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    return [{"role": "system", "content": system}, *shown, {"role": "user", "content": request}]


def tool_calls(draw: random.Random) -> Conversation:
    """A request for one of four tools with fixed schemas."""
    city, day, person = draw.choice(CITIES), draw.choice(DAYS), draw.choice(PEOPLE)
    request = draw.choice(
        (
            f"What is the weather in {city} on {day}?",
            f"Will it rain in {city} this {day}?",
            f"Meet {person} on {day} at {draw.randint(8, 18)}.",
            f"Put lunch with {person} into my calendar for {day}, {draw.randint(11, 14)} o'clock.",
            f"Order {draw.randint(2, 9)} {draw.choice(GOODS)}s to {city}.",
            f"Buy a {draw.choice(GOODS)} and ship it to {city}.",
            f"Tell {person} that the {draw.choice(GOODS)} arrives on {day}.",
        )
    )
    return turns(TOOLS, TOOL_EXAMPLES, request)


def sql_queries(draw: random.Random) -> Conversation:
    """A question about two tables, with an example of the wanted query."""
    first, second = draw.sample(sorted(TABLES), 2)
    columns = TABLES[first]
    wanted, other = draw.sample(columns[1:], 2)
    request = draw.choice(
        (
            f"List {wanted} of all {first}, sorted by {other}, the first {draw.randint(3, 50)}.",
            f"How many {first} are there for each {wanted}?",
            f"What is the average {columns[2]} of {first} by {wanted}?",
            f"Show every column of {first} where {wanted} is not null and {columns[0]} is above "
            f"{draw.randint(10, 900)}.",
        )
    )
    schema = "\n".join(f"CREATE TABLE {name} ({', '.join(TABLES[name])});" for name in (first, second))
    return turns(f"You write one SQL query and nothing else.\n{schema}", SQL_EXAMPLES, request)


def chat(draw: random.Random) -> Conversation:
    """A question of everyday chat: the traffic that a shipped head was trained for."""
    topic, reader = draw.choice(TOPICS), draw.choice(READERS)
    request = draw.choice(
        (
            f"Explain {topic} to {reader} in a few sentences.",
            f"Write a short paragraph for {reader} about {topic}.",
            f"Give me {draw.randint(3, 6)} facts about {topic}.",
            f"I am {reader}. Tell me {topic}, and why it matters.",
        )
    )
    return [{"role": "user", "content": request}]


DOMAINS: Mapping[str, Callable[[random.Random], Conversation]] = {
    "chat": chat,
    "tools": tool_calls,
    "sql": sql_queries,
}


def numbered_chats(start: int, number: int) -> Sequence[Conversation]:
    """Chats from this index on, as many as one likes: each says its number, so that no two are equal."""
    found = []
    for index in range(start, start + number):
        request = chat(random.Random(f"chat {index}"))[-1]["content"]
        found.append([{"role": "user", "content": f"Question {index}. {request}"}])
    return found


def conversations(domain: str, start: int, number: int) -> Sequence[Conversation]:
    """The prompts of a domain from this index on. No two are equal; ConfigError if there are too few."""
    found: dict[str, Conversation] = {}
    index = 0
    while len(found) < start + number:
        conversation = DOMAINS[domain](random.Random(f"{domain} {index}"))
        found.setdefault(conversation[-1]["content"] + conversation[0]["content"], conversation)
        index += 1
        if index > 50 * (start + number) + 1000:
            raise ConfigError(
                f"The templates of {domain} give {len(found)} different prompts and {start + number} are "
                "needed: ask for fewer requests."
            )
    return list(found.values())[start : start + number]
