"""Prompts to train a draft head with, made from word lists and from the standard library's sources.

    python examples/training_prompts.py 12000 > prompts.jsonl
    paceline train eagle3 smollm2-135m --data prompts.jsonl --out my-head

A substitute for traffic, where there is none yet: kinds of text about topics, questions, roles, functions
to complete, to annotate, to explain, to call. A head learns from the model's answers, so prompts need only
be varied and plausible.
"""

import ast
import json
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

TOPICS = """a weekend in the mountains|learning the piano|the history of bread|electric cars|remote work
bees and pollination|a small bakery|the water cycle|black holes|volcanoes|the Roman Empire
the French Revolution|chess openings|gardening in spring|healthy breakfasts|public libraries
the stock market|inflation and interest rates|renewable energy|solar panels at home|online privacy
artificial intelligence in medicine|machine learning|the immune system|vaccines|sleep and memory
the human heart|photosynthesis|plate tectonics|the periodic table|acids and bases|genetics|evolution
quantum mechanics|relativity|the speed of light|the solar system|a journey to Mars|the ocean floor
coral reefs|climate change|recycling|urban planning|public transport|cycling in cities|job interviews
time management|a startup's first year|customer support|marketing a new product|team meetings
writing a resume|personal finance|saving for retirement|buying a house|renting an apartment
travelling by train|a trip to Japan|street food in Mexico|the cinema of the 1960s|jazz music|classical music
modern art|poetry|science fiction novels|detective stories|board games|video games|football tactics
running a marathon|yoga for beginners|swimming|a family reunion|raising children|training a puppy
adopting a cat|supply chains|globalization|democracy and voting|human rights|philosophy of mind
ethics of technology|economics of scarcity|databases|operating systems|computer networks|cryptography
web development|version control|testing software|cloud computing|the printing press
the industrial revolution|ancient Egypt|the silk road|world trade|colonialism|the cold war|space exploration
coffee|tea ceremonies|wine making|baking sourdough|vegetarian cooking|food safety|antibiotics|nutrition
mental health|stress at work|a lost letter|an old lighthouse|a talking river|two rival magicians
a robot who paints|a haunted library|the last bookshop|negotiation|leadership|a difficult colleague
feedback at work|public speaking|a wedding speech|an apology|a complaint about a late parcel"""
FORMS = """blog post|short story|news article|poem|speech|email to a friend|formal email|product description
letter to the editor|dialogue|review|outline for an essay|five paragraph essay|list of ten tips
step by step guide|social media post|press release|summary for children|set of interview questions
lesson plan|advertisement|diary entry|fairy tale|movie plot|persuasive argument|pros and cons list
quiz with answers|glossary of terms|comparison table|short biography|welcome message|job description
business plan|meeting agenda|frequently asked questions page"""
ROLES = """an experienced doctor|a patient math tutor|a travel guide|a chef|a career coach
a stand-up comedian|a pirate captain|a historian|a physics professor|a software architect|a gardener
a librarian|a financial adviser|a personal trainer|a journalist|an old wizard|a detective|a philosopher
a marketing manager|a kindergarten teacher|an astronaut|a film critic|a nutritionist|a lawyer|a musician
a robot from the future"""
STYLES = """in a friendly tone|in simple words|in a formal style|with concrete examples
in fewer than 150 words|in about 300 words|with headings|in bullet points|in three paragraphs
as if to a ten year old|with a surprising ending|in the first person
with a short introduction and a conclusion"""
QUESTIONS = """What is {topic}?|Why does {topic} matter?|How would you explain {topic} to a beginner?
What are common mistakes with {topic}?|What is the history of {topic}?
Who should care about {topic}, and why?|What are the main ideas behind {topic}?
How has {topic} changed over time?|What are three surprising facts about {topic}?
Compare {topic} and {other}.|How are {topic} and {other} related?|Discuss {topic} and its impact.
Describe {topic} and give an example.|What questions should I ask about {topic}?
Can you help me understand {topic}?|Is {topic} overrated? Explain."""
PLACES = """France|Japan|Brazil|Kenya|Canada|India|Norway|Egypt|Mexico
Italy|Poland|Chile|Vietnam|Greece|Turkey|Spain|Peru|Ireland"""
FACTS = """What is the capital of {place}?|What language is spoken in {place}?|What is {place} famous for?
When is the best time to visit {place}?|Which countries border {place}?
Who is a well known writer from {place}?|What do people eat in {place}?|What is the population of {place}?
What happened in {place} in the 20th century?|How big is {place}?|What is the currency of {place}?
Plan three days in {place}."""
NAMES = """Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jonas|Kofi
Lena|Maria|Noah|Olga|Pedro|Ruth|Sam|Tara|Victor|Yuki|Zoe"""
THINGS = """apples|books|tickets|pencils|cookies|marbles|stamps|flowers
chairs|cards|bottles|eggs|coins|shirts|boxes|photos"""
SUMS = """{a} has {x} {things}. {b} gives {a} {y} more, and {a} sells half of them. How many are left?
{a} buys {x} {things} for ${y} each and pays with ${big}. How much change does {a} get?
A shop sells {x} {things} a day at ${y} each. How much does it earn in {z} weeks?
{a} can pack {x} {things} in an hour and {b} can pack {y}. How long do they need for {big} {things} together?
There are {big} {things} in {z} equal boxes. How many are in {y} boxes?
{a} is {x} years old and {b} is {y} years younger. In {z} years, how old will both be together?
A train travels {big} km in {z} hours. How far does it go in {y} hours at the same speed?
{x}% of {big} {things} are red and {y} of the others are blue. How many are neither?
Solve for x: {z}x + {y} = {big}. Show your work.
If a triangle has sides of {x}, {y} and {z}, is that possible? Explain.
What is {x} * {y} - {z}? Think step by step.
What is the probability of drawing one of {z} red cards from {big} cards?"""
CODE = """Write a Python function that {task}.
Implement a function in Python that {task}. Include an example.|How do I write code that {task}?
Write a C++ program that {task}.|Write a JavaScript function that {task}.
Write unit tests for a Python function that {task}."""
TASKS = """reverses the words of a sentence|finds the second largest number in a list
counts the vowels of a string|merges two sorted lists|checks whether a number is prime
computes the first n Fibonacci numbers|removes duplicates from a list and keeps the order
sorts a list of tuples by the second item|finds the longest common prefix of several strings
converts Celsius to Fahrenheit|validates an email address|flattens a nested list
rotates a matrix by 90 degrees|checks whether brackets are balanced
counts how often each word occurs in a file|finds all anagrams in a list of words
computes the greatest common divisor|implements binary search|implements a stack with a minimum
implements a queue with two stacks|reads a CSV file and prints the average of a column
generates a random password|checks whether a string is a palindrome
computes the edit distance of two strings|finds the shortest path in a graph
traverses a binary tree level by level|finds the missing number from 1 to n|groups strings by their length
converts a number to Roman numerals|rounds prices to two decimals|finds two numbers that add up to a target
sums the digits of a number|splits a list into chunks|counts inversions|finds the median of two sorted lists
prints a multiplication table"""
TEXT_WORK = """Summarize the following text in two sentences:|Rewrite the following text in simpler words:
Correct the grammar of this text:
List the named entities of the following text as JSON with the keys people, places and organizations:
What is the sentiment of this review? Explain.|Extract all dates and numbers from this text:
Turn this into bullet points:|Write a title for the following text:|Translate this to Spanish:
Translate this to French:|Translate this to German:
Answer the question with the help of the text, and quote the sentence:|Continue this text:
Classify the following text as news, opinion or advertisement:"""
SENTENCES = """{a} opened a small shop for {things} in {place} in {year}.
The first customers were friends, but soon people came from other towns.
In {year} the company sold {big} {things} and had {x} employees.
{b} said that the service was slow but the quality was excellent.|Critics wrote about {topic} as well.
The council of the city decided to invest ${big} in {topic}.
Later {a} moved to {place} and wrote a book about {topic}.|Nobody knew what would happen next.
The weather was bad on the {z}th of March, and the meeting was cancelled.
Experts disagree about {topic}, and more research is needed.|It was the best decision of {b}'s life."""

Make = Callable[[random.Random], list[dict[str, str]]]


def words(text: str) -> list[str]:
    return [part for line in text.splitlines() for part in line.split("|")]


def filled(template: str, draw: random.Random) -> str:
    """A template with its placeholders filled in."""
    first, second = draw.sample(words(NAMES), 2)
    topic, other = draw.sample(words(TOPICS), 2)
    return template.format(
        a=first,
        b=second,
        topic=topic,
        other=other,
        place=draw.choice(words(PLACES)),
        things=draw.choice(words(THINGS)),
        task=draw.choice(words(TASKS)),
        x=draw.randint(3, 40),
        y=draw.randint(2, 20),
        z=draw.randint(2, 9),
        big=draw.randint(6, 60) * 10,
        year=draw.randint(1890, 2020),
    )


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def writing(draw: random.Random) -> list[dict[str, str]]:
    verb = draw.choice(("Write", "Compose", "Draft", "Create", "Help me write", "Please write", "I need"))
    style = "" if draw.random() < 0.4 else " " + draw.choice(words(STYLES))
    form = draw.choice(words(FORMS))
    article = "an" if form[0] in "aeiou" else "a"
    return user(f"{verb} {article} {form} about {draw.choice(words(TOPICS))}{style}.")


def role(draw: random.Random) -> list[dict[str, str]]:
    question = filled(draw.choice(words(QUESTIONS)), draw)
    start = draw.choice(("You are", "Act as", "Pretend to be", "Imagine you are"))
    return user(f"{start} {draw.choice(words(ROLES))}. {question}")


def question(draw: random.Random) -> list[dict[str, str]]:
    return user(filled(draw.choice(words(QUESTIONS)), draw))


def fact(draw: random.Random) -> list[dict[str, str]]:
    return user(filled(draw.choice(words(FACTS)), draw))


def arithmetic(draw: random.Random) -> list[dict[str, str]]:
    return user(filled(draw.choice(words(SUMS)), draw))


def text_work(draw: random.Random) -> list[dict[str, str]]:
    sentences = [filled(sentence, draw) for sentence in draw.sample(words(SENTENCES), draw.randint(3, 7))]
    return user(f"{draw.choice(words(TEXT_WORK))}\n{' '.join(sentences)}")


def programming(draw: random.Random) -> list[dict[str, str]]:
    return user(filled(draw.choice(words(CODE)), draw))


def library_functions() -> list[tuple[str, str, ast.FunctionDef]]:
    """Source, docstring and syntax tree of the standard library's short documented functions."""
    functions = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
                if 120 < len(code) < 1200:
                    functions.append((code, text, node))
    return functions


def library_work(functions: list[tuple[str, str, ast.FunctionDef]]) -> Make:
    whole = (
        "Add type annotations to this function and change nothing else. Answer with the whole function.",
        "Add type hints to the following Python code. Reply with code only.",
        "Rename the variables of this function so that it reads better. Answer with the whole code.",
        "Explain what this code does.",
        "Write a docstring for this function. Answer with the whole function.",
        "Find possible bugs in this code and fix them.",
        "Write unit tests for this function.",
        "Rewrite this function in JavaScript.",
        "Add comments to this code and leave the code as it is.",
    )
    partial = (
        "Complete this Python function. Answer with the whole function.",
        "Implement the following function in Python. Reply with one code block.",
        "Finish this function:",
        "Write the body of this Python function.",
    )

    def make(draw: random.Random) -> list[dict[str, str]]:
        code, text, _ = draw.choice(functions)
        if draw.random() < 0.5:
            return user(f"{draw.choice(whole)}\n```python\n{code}\n```")
        before = code.split('"""')[0].rstrip() if '"""' in code else code.split("\n")[0]
        body = textwrap.indent(f'"""{text}"""', "    ")
        return user(f"{draw.choice(partial)}\n```python\n{before}\n{body}\n```")

    return make


def tool_call(functions: list[tuple[str, str, ast.FunctionDef]]) -> Make:
    kinds = ("string", "integer", "number", "boolean")

    def make(draw: random.Random) -> list[dict[str, str]]:
        _, text, node = draw.choice(functions)
        names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")] or [
            "value"
        ]
        properties = {
            name: {"type": draw.choice(kinds), "description": f"The {name.replace('_', ' ')}."}
            for name in names
        }
        tool = {
            "name": node.name.strip("_") or "run",
            "description": text.split("\n")[0],
            "parameters": {"type": "object", "properties": properties, "required": names[:2]},
        }
        start = draw.choice(
            (
                "Answer with a JSON object that calls this function:",
                "Call this function. Reply with JSON only:",
            )
        )
        wish = filled(
            draw.choice(
                (
                    "Please do this for {a} with {x} {things} in {place}.",
                    "{a} wants {topic}, {x} times, at ${y}.",
                )
            ),
            draw,
        )
        values = ", ".join(
            f"{name.replace('_', ' ')} {draw.choice((draw.randint(1, 99), draw.choice(words(NAMES))))}"
            for name in names[:3]
        )
        return [
            {"role": "system", "content": f"{start} {json.dumps(tool)}"},
            {"role": "user", "content": f"{wish} Use {values}."},
        ]

    return make


def prompts(number: int, seed: int) -> Iterator[dict[str, object]]:
    functions = library_functions()
    kinds: list[tuple[str, int, Make]] = [
        ("chat", 5, writing),
        ("chat", 3, role),
        ("chat", 4, question),
        ("chat", 2, text_work),
        ("qa", 1, fact),
        ("math", 1, arithmetic),
        ("code", 3, programming),
        ("code", 4, library_work(functions)),
        ("tools", 1, tool_call(functions)),
    ]
    draw = random.Random(seed)
    seen = set()
    while len(seen) < number:
        segment, _, make = draw.choices(kinds, [share for _, share, _ in kinds])[0]
        messages = make(draw)
        key = json.dumps(messages)
        if key not in seen:
            seen.add(key)
            yield {"id": f"made-{seed}-{len(seen)}", "segment": segment, "messages": messages}


if __name__ == "__main__":
    for row in prompts(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        print(json.dumps(row))
