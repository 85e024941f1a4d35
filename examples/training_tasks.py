"""Prompts to train a draft head with, most of them made of texts that the target has written before.

    python examples/training_tasks.py texts 4000 > texts.jsonl
    paceline train answers MODEL --data texts.jsonl --temperatures 0.9 --out texts-answers.jsonl
    python examples/training_tasks.py tasks 20000 --answers texts-answers.jsonl --model MODEL > tasks.jsonl
    paceline train eagle3 MODEL --data tasks.jsonl --data texts-answers.jsonl --out my-head

First the target writes lists of requests and of questions, sentences in other languages, articles, passages
with a question, and programs. Then these are asked, translated, summarized, read, and edited. Calls of
functions, queries and records need no texts: they are made of word lists.
"""

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

Messages = list[dict[str, str]]
Make = Callable[[random.Random], Messages]

SUBJECTS = """astronomy|cooking|personal finance|gardening|world history|basketball|marine biology|chess
poetry|road trips|immunology|ancient Rome|machine learning|carpentry|the labour market|urban transport|jazz
climate policy|photography|dogs|cats|nutrition|public health|psychology|medieval castles|opera|cinema
television series|pop music|video games|football clubs|the Olympic Games|tennis|cycling|mountaineering
rivers and lakes|volcanoes|earthquakes|weather|agriculture|wine|bread|coffee|fashion|architecture|museums
railways|aviation|shipping|electric cars|space flight|telescopes|chemistry|physics|geometry|statistics
probability|number theory|logic puzzles|databases|operating systems|compilers|web development|networks
security|cloud computing|robotics|mobile apps|spreadsheets|start-ups|marketing|taxes|insurance|banking
real estate|elections|parliaments|courts of law|human rights|philosophy|ethics|religions|languages
grammar|literature|fairy tales|detective novels|science fiction|theatre|painting|sculpture|education
universities|kindergartens|job interviews|remote work|meetings|friendship|weddings|birthdays|holidays
hotels|airlines|restaurants|recipes|sports medicine|sleep|exercise|first aid|dentists|vaccines|genetics
evolution|dinosaurs|birds|insects|forests|deserts|oceans|islands|Africa|Japan|Brazil|India|Germany|Canada
Mexico|Egypt|Scandinavia|the United States|China|France|the Ottoman Empire|the Renaissance
the industrial revolution|the Second World War|the Cold War|inventors|explorers|presidents|kings and queens
mathematicians|composers|novelists|actors|athletes|scientists|energy|mining|steel|textiles|paper|recycling
water supply|fire brigades|police work|journalism|radio|advertising|libraries|charities|trade unions"""
REQUESTS = """writing|role play|reasoning|planning|explanation|brainstorming|rewriting|comparison|advice
extraction of facts from a short given text|science homework|essay|creative story|email|poem|debate
classification|interview preparation|step by step instruction|business|Python programming|debugging
mathematics|humanities|correction of a given faulty sentence"""
LANGUAGES = """German|German|German|German|German|German|French|Spanish|Italian|Portuguese|Dutch
Russian|Chinese|Polish"""
PROGRAMS = """Python|Python|Python|Python|Python|JavaScript|TypeScript|Java|C++|Go|Rust|SQL|a shell script"""
PURPOSES = """an inventory of a shop|a library of books|a bank account|a queue of print jobs|a chat room
parsing of log files|a cache with a maximum size|matrix operations|a graph and shortest paths|text statistics
a calendar of appointments|a tic-tac-toe game|a tokenizer for arithmetic|a simple web server|file backups
prices with taxes and discounts|a student register|unit conversion|a rate limiter|a binary search tree
a linked list|string formatting|date arithmetic|reading CSV files|validation of forms|a to-do list
a shopping cart|temperature measurements|a parking garage|ranking of players|a password checker|a bloom filter
prime numbers|sorting|a priority queue|image thumbnails|a weather client|currency exchange|a vending machine
an event bus|a plugin system|configuration files|retries with waiting times|a state machine|a maze"""
EDITS = """Add type annotations to every parameter and return value, and change nothing else.
Add a docstring to every function and class, and change nothing else.|Rename the variables to be clearer.
Add input validation that raises a ValueError.|Make this code shorter without changing what it does.
Add logging to this code.|Replace loops by comprehensions where that reads better.
Find the bugs in this code, if there are any, and fix them.|Add comments that explain each step.
Turn this into a class.|Turn the constants into parameters with default values.|Use f-strings everywhere.
Split long functions into smaller ones.|Add a main function with an example.|Handle empty inputs.
Make the names of all functions camelCase, and change nothing else.|Add error handling.
Rewrite this with dataclasses.|Make this code asynchronous.|Remove the comments, and change nothing else."""
ENDINGS = """Answer with the whole code in one code block.|Answer with the whole code.|Reply with code only.
Return the complete file.|Show the complete code."""
ABOUT_CODE = """Explain this code.|Write unit tests for this code.|What is the complexity of this code?
Translate this code to {language}.|Review this code.|What does this code print?
Document this code in Markdown."""
SUMMARIES = """Summarize: {text}|Summarize: {text}|Summarize: {text}|Summarize the following text:\\n{text}
{text}\\n\\nSummarize this article in three sentences.|TL;DR of this, please: {text}
{text}\\nList the key points.|Write a headline and a short summary: {text}"""
READINGS = """{text}\\n{question}|{text}\\n{question}|{text}\\n\\nQuestion: {question}
Answer the question with the help of the text.\\n\\nText: {text}\\n\\nQuestion: {question}
Context: {text}\\n\\n{question} Answer briefly."""
TRANSLATIONS = """Translate {language} to English: {text}|Translate {language} to English: {text}
Translate {language} to English: {text}|Translate to English: {text}|What does this mean in English? {text}
Translate this {language} sentence into English:\\n{text}|{text}\\n\\nTranslate this into English."""
FROM_ENGLISH = "Translate English to {language}: {text}|How do I say this in {language}? {text}"
VERBS = """get find search list calculate convert book cancel schedule update create delete compare estimate
track send order reserve analyze predict plot translate lookup fetch check validate generate"""
NOUNS = """weather flight hotel restaurant invoice order parcel meeting reminder ticket playlist recipe route
distance currency loan mortgage interest tax salary stock portfolio area volume perimeter velocity energy
calories medicine patient appointment employee student course grade book movie song event concert match team
player score ranking population capital river mountain museum car train bus bike_rental parking_space house
apartment database table user account password file image document report email message sensor temperature"""
FIELDS: dict[str, tuple[str, str, tuple[object, ...]]] = {
    "city": ("string", "The name of the city.", ("Lisbon", "Oslo", "Kyoto", "Boston", "Lima", "Cairo")),
    "country": ("string", "The country.", ("Norway", "Peru", "Japan", "Kenya", "France", "Canada")),
    "date": ("string", "The date, as YYYY-MM-DD.", ("2024-03-05", "2025-11-30", "2023-07-14")),
    "name": ("string", "The full name.", ("Ana Silva", "John Reed", "Mei Chen", "Omar Aziz", "Eva Novak")),
    "amount": ("number", "The amount.", (12.5, 99.9, 1500, 250, 7.25, 40000)),
    "count": ("integer", "How many.", (1, 2, 3, 5, 8, 12, 40, 100)),
    "unit": ("string", "The unit of the result.", ("meters", "miles", "celsius", "kilograms", "hours")),
    "currency": ("string", "The currency code.", ("EUR", "USD", "JPY", "GBP")),
    "radius": ("integer", "The radius.", (2, 5, 10, 25, 50)),
    "height": ("integer", "The height.", (3, 6, 15, 180)),
    "width": ("integer", "The width.", (4, 7, 20, 64)),
    "category": ("string", "The category.", ("sports", "science", "music", "food", "travel")),
    "genre": ("string", "The genre.", ("comedy", "jazz", "thriller", "fantasy")),
    "year": ("integer", "The year.", (1969, 1987, 2001, 2015, 2022)),
    "start_time": ("string", "When it starts.", ("09:00", "14:30", "18:15")),
    "duration": ("integer", "The duration in minutes.", (15, 30, 45, 90)),
    "rate": ("number", "The yearly rate in percent.", (1.5, 3.2, 4.75, 6)),
    "include_details": ("boolean", "Whether to include details.", (True, False)),
    "language": ("string", "The language of the answer.", ("English", "Spanish", "German")),
    "ids": ("array", "The identifiers.", ([3, 7], [12, 15, 18], [101])),
    "email": ("string", "The e-mail address.", ("ana@example.com", "j.reed@example.org")),
    "limit": ("integer", "The maximum number of results.", (5, 10, 20)),
    "order_by": ("string", "The field to sort by.", ("price", "date", "name", "rating")),
}
CALL = """Answer with one JSON object that calls the function: {tool}
Call the function. Reply with JSON only: {tool}
Answer with a JSON object that calls this function: {tool}
You can call this function: {tool} Reply with {{"name": ..., "arguments": {{...}}}} and nothing else."""
WISHES = """Please {verb} the {noun} with {values}.|I need to {verb} a {noun}: {values}.
{verb} {noun}, {values}.|Can you {verb} the {noun} for me? It has {values}.|What is the {noun} for {values}?
{values}. {verb} the {noun}!"""
QUERIES = """Write an SQL query on the table {noun}({columns}) that lists the {order} ten by {a}.
Given the table {noun}({columns}), write SQL for the average {a} per {b}.
Write a CREATE TABLE statement for {noun} with the columns {columns}, and insert three rows.
The table {noun} has the columns {columns}. Which rows have a {a} above the average? Write SQL.
Write an SQL query that joins {noun}({columns}) with orders(id, {noun}_id, total) and sums total per {b}.
Make a JSON array of five {noun} records with the fields {columns}.
Write a JSON schema for a {noun} with the fields {columns}.
Write a Python dataclass for a {noun} with the fields {columns}, and functions to and from JSON.
Turn this into JSON: {noun}, {values}.|Write a YAML file that describes a {noun}: {values}.
Make a Markdown table of four {noun} entries with the columns {columns}.
Write a TypeScript interface for a {noun} with the fields {columns}."""


def words(text: str) -> list[str]:
    """The entries of a list."""
    return [part.replace("\\n", "\n") for line in text.splitlines() for part in line.split("|")]


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


# The first stage: the target writes.


def requests(draw: random.Random) -> Messages:
    kind, subject = draw.choice(words(REQUESTS)), draw.choice(words(SUBJECTS))
    return user(
        f"Write a numbered list of 12 different {kind} requests that people might send to an AI assistant, "
        f"related to {subject}. Each is one to three sentences and complete. Write only the list."
    )


def questions(draw: random.Random) -> Messages:
    start = draw.choice(("who", "when", "where", "what", "how many", "which", "why", "how"))
    return user(
        f"Write a numbered list of 15 short questions about facts of {draw.choice(words(SUBJECTS))}, most of "
        f'them with "{start}". Use names of people, places and works. Write only the questions.'
    )


def sentences(draw: random.Random) -> Messages:
    language, subject = draw.choice(words(LANGUAGES)), draw.choice(words(SUBJECTS))
    return user(
        f"Write 8 different {language} sentences such as newspapers print them, about {subject}. Some are "
        f"long. Number them, and write only {language}."
    )


def article(draw: random.Random) -> Messages:
    subject, other = draw.sample(words(SUBJECTS), 2)
    return user(
        f"Write a newspaper report of about 250 words on an event that has to do with {subject} and {other}, "
        "with names, numbers and quotations, in plain paragraphs and without a headline."
    )


def passage(draw: random.Random) -> Messages:
    return user(
        f"Write a paragraph of about 180 words from an encyclopedia, on one specific topic within "
        f'{draw.choice(words(SUBJECTS))}. Then write two lines that begin with "Question:", each with one '
        "short question that the paragraph answers."
    )


def program(draw: random.Random) -> Messages:
    size = draw.choice(("short", "short", "small", "medium sized"))
    language, purpose = draw.choice(words(PROGRAMS)), draw.choice(words(PURPOSES))
    return user(f"Write a {size} program for {purpose}, as {language}. Answer with one code block.")


# The second stage: what was written is asked, translated, summarized, read and edited.


def lines(text: str) -> list[str]:
    """The entries of a numbered list, without the last one, which may be cut off."""
    found = re.findall(r"^\s*\d+[.)]\s+(.+?)\s*$", text, re.MULTILINE)[:-1]
    return [entry.replace("**", "").strip('"“” ') for entry in found]


def translations(asked: str, text: str, draw: random.Random) -> Iterator[Messages]:
    language = re.findall(r"different (\w+) sentences", asked)[0]
    for sentence in lines(text):
        yield user(draw.choice(words(TRANSLATIONS)).format(language=language, text=sentence))


def summaries(asked: str, text: str, draw: random.Random) -> Iterator[Messages]:
    first = " ".join(text.split())
    yield user(draw.choice(words(SUMMARIES)).format(text=first))
    sentence = draw.choice([part for part in re.split(r"(?<=[.!?]) ", first) if len(part) > 40] or [first])
    language = draw.choice(words(LANGUAGES))
    yield user(draw.choice(words(FROM_ENGLISH)).format(text=sentence, language=language))


def readings(asked: str, text: str, draw: random.Random) -> Iterator[Messages]:
    before, *after = text.replace("*", "").split("Question:")
    found = " ".join(before.split())
    for question in (part.strip().split("\n")[0] for part in after if part.strip()):
        yield user(draw.choice(words(READINGS)).format(text=found, question=question))


def edits(asked: str, text: str, draw: random.Random) -> Iterator[Messages]:
    found = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    if found and 100 < len(found[0][1]) < 1600:
        code = f"```{found[0][0]}\n{found[0][1]}```"
        for edit in draw.sample(words(EDITS), 2):
            yield user(f"{edit} {draw.choice(words(ENDINGS))}\n{code}")
        if draw.random() < 0.4:
            language = draw.choice(words(PROGRAMS)[4:])
            yield user(draw.choice(words(ABOUT_CODE)).format(language=language) + f"\n{code}")


def asked_again(asked: str, text: str, draw: random.Random) -> Iterator[Messages]:
    yield from (user(entry) for entry in lines(text) if len(entry) > 20)


Use = Callable[[str, str, random.Random], Iterator[Messages]]
# the segment of a text: its share, how it is asked for, the segment of the tasks from it, and their maker
TEXTS: dict[str, tuple[int, Make, str, Use]] = {
    "text-requests": (9, requests, "chat", asked_again),
    "text-questions": (3, questions, "qa", asked_again),
    "text-sentences": (6, sentences, "translation", translations),
    "text-article": (9, article, "summarization", summaries),
    "text-passage": (11, passage, "rag", readings),
    "text-program": (8, program, "edit", edits),
}


def call(draw: random.Random) -> Messages:
    """A function to call, and a wish."""
    verb, noun = draw.choice(VERBS.split()), draw.choice(NOUNS.split())
    chosen = draw.sample(sorted(FIELDS), draw.randint(1, 5))
    values = {name: draw.choice(FIELDS[name][2]) for name in chosen}
    properties = {name: {"type": FIELDS[name][0], "description": FIELDS[name][1]} for name in chosen}
    tool = {
        "name": draw.choice((f"{verb}_{noun}", f"{noun}.{verb}", f"{verb}{noun.title()}".replace("_", ""))),
        "description": f"{verb.capitalize()} the {noun.replace('_', ' ')} with the given values.",
        "parameters": {
            "type": draw.choice(("object", "dict")),
            "properties": properties,
            "required": chosen[: draw.randint(1, len(chosen))],
        },
    }
    wish = draw.choice(words(WISHES)).format(
        verb=verb, noun=noun.replace("_", " "), values=spoken(values, draw)
    )
    system = draw.choice(words(CALL)).format(tool=json.dumps(tool))
    return [{"role": "system", "content": system}, *user(wish[0].upper() + wish[1:])]


def spoken(values: dict[str, object], draw: random.Random) -> str:
    """Fields and values, as one would say them."""
    link = draw.choice((" ", " of ", " = ", ": "))
    return ", ".join(f"{name.replace('_', ' ')}{link}{value}" for name, value in values.items())


def record(draw: random.Random) -> Messages:
    """A query, or a record to write down."""
    noun, chosen = draw.choice(NOUNS.split()), draw.sample(sorted(FIELDS), draw.randint(3, 6))
    values = {name: draw.choice(FIELDS[name][2]) for name in chosen}
    return user(
        draw.choice(words(QUERIES)).format(
            noun=noun,
            columns=", ".join(("id", *chosen)),
            a=chosen[0],
            b=chosen[1],
            order=draw.choice(("highest", "lowest")),
            values=spoken(values, draw),
        )
    )


LISTED: tuple[tuple[str, int, Make], ...] = (("tools", 5, call), ("code", 3, record))
Row = dict[str, object]


def text_prompts(number: int, seed: int) -> Iterator[Row]:
    """The prompts of the first stage; two may be the same, since their answers are drawn."""
    draw = random.Random(seed)
    for index in range(number):
        segment = draw.choices(list(TEXTS), [share for share, *_ in TEXTS.values()])[0]
        yield {"id": f"text-{seed}-{index}", "segment": segment, "messages": TEXTS[segment][1](draw)}


def tasks(texts: list[tuple[str, str, str]], number: int, seed: int) -> Iterator[Row]:
    """Prompts from texts (segment, prompt, answer), and others without one."""
    draw = random.Random(seed)
    found: dict[str, list[Messages]] = defaultdict(list)
    for segment, asked, text in texts:
        if segment in TEXTS:
            _, _, name, use = TEXTS[segment]
            found[name] += use(asked, text, draw)
    rows = [(name, made) for name, all_made in found.items() for made in draw.sample(all_made, len(all_made))]
    for name, share, make in LISTED:
        rows += [(name, make(draw)) for _ in range(number * share // 32)]
    draw.shuffle(rows)
    for index, (name, messages) in enumerate(rows[:number]):
        yield {"id": f"task-{seed}-{index}", "segment": name, "messages": messages}


def written(path: Path, model: str) -> list[tuple[str, str, str]]:
    """Segment, prompt and answer of each row of a file of answers."""
    from paceline.models.registry import load_tokenizer, resolve

    tokenizer = load_tokenizer(resolve(model))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[1:] if line]
    return [
        (row["segment"], *(tokenizer.decode(row["ids"][part]) for part in _halves(row["answer"])))
        for row in rows
    ]


def _halves(answer: int) -> tuple[slice, slice]:
    return slice(answer), slice(answer, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("stage", choices=("texts", "tasks"))
    parser.add_argument("number", type=int)
    parser.add_argument("--answers", type=Path, help="the target's answers to the prompts of the first stage")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="the target, whose tokens they are")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.stage == "texts":
        rows = text_prompts(given.number, given.seed)
    else:
        texts = written(given.answers, given.model) if given.answers else []
        rows = tasks(texts, given.number, given.seed)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
