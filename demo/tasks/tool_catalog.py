"""The fixed tools: their schemas, how people ask for them, and what their results read like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.tasks import words
from demo.tasks.item import Tool
from demo.tasks.lists import sentence

Draw = Callable[[Random], dict[str, object]]
Result = Callable[[Random, dict[str, object]], tuple[object, str]]


@dataclass(frozen=True, kw_only=True)
class KnownTool:
    """One tool: `properties` maps a parameter to its JSON type and description."""

    name: str
    description: str
    properties: dict[str, tuple[str, str]]
    draw: Draw
    asks: tuple[str, ...]
    pairs: tuple[str, ...] = ()
    """Requests that need two calls, with the arguments `a` and `b`."""
    result: Result | None = None

    @property
    def tool(self) -> Tool:
        """The tool in the OpenAI format."""
        properties = {
            name: {"type": kind, "description": text}
            for name, (kind, text) in self.properties.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def shown(self, arguments: dict[str, object]) -> dict[str, object]:
        """The arguments that the schema knows, in its order."""
        return {name: arguments[name] for name in self.properties}

    def results(self, rng: Random, arguments: dict[str, object]) -> tuple[object, str]:
        """What the tool answers and what the assistant then says."""
        assert self.result is not None
        return self.result(rng, arguments)


def _weather(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    degrees = rng.randint(-15, 40)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy"))
    result = {"temperature": degrees, "condition": sky}
    if rng.random() < 0.3:
        result = {"condition": sky, "temperature": degrees}
    return result, f"It is {degrees} degrees and {sky} in {a['city']}."


def _time(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    return {"time": clock}, f"It is {clock} in {a['city']}."


def _calculation(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    value = rng.randint(-99, 99999)
    return {"result": value}, f"{a['expression']} = {value}"


def _price(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    price = rng.randint(10, 900) + rng.choice((0.25, 0.5, 0.75, 0.99))
    return {"price": price, "currency": "USD"}, f"{a['symbol']} costs {price} USD."


def _converted(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    value = rng.randint(1, 5000)
    text = f"{a['amount']} {a['source']} is {value} {a['target']}."
    return {"amount": value, "currency": a["target"]}, text


def _mail(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    if rng.random() < 0.2:
        return {"error": "no such address"}, "Sorry, that failed: no such address."
    return {"status": "sent"}, f"I sent the message to {a['to']}."


def _done(text: str) -> Result:
    def result(rng: Random, a: dict[str, object]) -> tuple[object, str]:
        status = rng.choice(({"status": "ok"}, {"ok": True}, {"success": True}))
        return status, text.format(**a)

    return result


def _age(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    name, city = rng.choice(words.NAMES), rng.choice(words.CITIES)
    text = f"User {a['user_id']} is {name} from {city}."
    return {"id": a["user_id"], "name": name, "city": city}, text


def _file(rng: Random, a: dict[str, object]) -> tuple[object, str]:
    text = sentence(rng)
    return {"content": text}, f"The file {a['path']} says: {text}"


def _path(rng: Random) -> str:
    folder, name = rng.choice(("home", "data", "tmp", "docs", "src")), rng.choice(words.OBJECTS)
    return f"/{folder}/{name}.{rng.choice(('txt', 'md', 'py', 'json', 'csv'))}"


def _expression(rng: Random) -> str:
    a, b, c = rng.randrange(10000), rng.randrange(1000), rng.randrange(100)
    return rng.choice(
        (f"{a} * {b}", f"{a} + {b}", f"{a} - {b}", f"({a} + {b}) * {c}", f"{a} / {c}")
    )


def _mail_arguments(rng: Random) -> dict[str, object]:
    name = rng.choice(words.NAMES).lower()
    subject = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.OBJECTS)}"
    domain = rng.choice(("example.com", "mail.org", "mill.net"))
    return {"to": f"{name}@{domain}", "subject": subject, "body": sentence(rng)}


CATALOG = (
    KnownTool(
        name="get_weather", description="Get the current weather in a city",
        properties={"city": ("string", "The name of the city")},
        draw=lambda r: {"city": r.choice(words.CITIES)},
        asks=("What is the weather in {city}?", "What's the weather like in {city}?",
              "How is the weather in {city} today?", "Is it raining in {city}?",
              "Tell me the weather in {city}.", "Do I need an umbrella in {city}?",
              "How warm is it in {city}?", "Weather in {city}?", "Check the weather in {city}.",
              "What is the temperature in {city}?", "what's the weather in {city} right now?"),
        pairs=("What is the weather in {a[city]} and in {b[city]}?",
               "Compare the weather in {a[city]} and {b[city]}."),
        result=_weather,
    ),
    KnownTool(
        name="get_forecast", description="Get the weather forecast for some days",
        properties={"city": ("string", "City"), "days": ("integer", "Number of days")},
        draw=lambda r: {"city": r.choice(words.CITIES), "days": r.randint(2, 14)},
        asks=("What is the forecast for {city} for the next {days} days?",
              "Give me the {days} day forecast for {city}.",
              "How will the weather be in {city} in the next {days} days?"),
    ),
    KnownTool(
        name="get_time", description="Get the local time in a city",
        properties={"city": ("string", "The city")},
        draw=lambda r: {"city": r.choice(words.CITIES)},
        asks=("What time is it in {city}?", "What's the time in {city}?",
              "Tell me the time in {city}.", "How late is it in {city} now?",
              "What is the local time in {city}?", "Current time in {city}?"),
        pairs=("What time is it in {a[city]} and in {b[city]}?",),
        result=_time,
    ),
    KnownTool(
        name="calculator", description="Evaluate an arithmetic expression",
        properties={"expression": ("string", "The expression to evaluate")},
        draw=lambda r: {"expression": _expression(r)},
        asks=("What is {expression}?", "Calculate {expression}.", "Compute {expression}.",
              "Use the calculator for {expression}.", "How much is {expression}?"),
        result=_calculation,
    ),
    KnownTool(
        name="get_stock_price", description="Get the latest price of a stock",
        properties={"symbol": ("string", "The ticker symbol")},
        draw=lambda r: {"symbol": r.choice(words.STOCKS)},
        asks=("What is the price of {symbol}?", "How much is {symbol} stock?",
              "Get me the stock price of {symbol}.", "What does {symbol} trade at?"),
        pairs=("What are the prices of {a[symbol]} and {b[symbol]}?",),
        result=_price,
    ),
    KnownTool(
        name="convert_currency", description="Convert an amount of money",
        properties={"amount": ("number", "How much"), "source": ("string", "From currency"),
                    "target": ("string", "To currency")},
        draw=lambda r: dict(zip(("source", "target"), r.sample(words.CURRENCIES, 2), strict=True),
                            amount=r.randint(1, 5000)),
        asks=("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
              "What is {amount} {source} in {target}?", "Change {amount} {source} into {target}."),
        result=_converted,
    ),
    KnownTool(
        name="send_email", description="Send an email",
        properties={"to": ("string", "Address"), "subject": ("string", "Subject line"),
                    "body": ("string", "Text of the mail")},
        draw=_mail_arguments,
        asks=('Send an email to {to} with the subject "{subject}" and the text "{body}"',
              "Write a mail to {to}, subject {subject}: {body}",
              'Email {to} about "{subject}": "{body}"'),
        result=_mail,
    ),
    KnownTool(
        name="set_timer", description="Start a timer",
        properties={"minutes": ("integer", "Minutes to wait"), "label": ("string", "Its name")},
        draw=lambda r: {"minutes": r.randint(1, 90), "label": r.choice(words.OBJECTS)},
        asks=("Set a timer of {minutes} minutes called {label}.",
              "Start a {minutes} minute timer for the {label}.",
              "Remind me of the {label} in {minutes} minutes."),
        result=_done("The timer {label} runs for {minutes} minutes."),
    ),
    KnownTool(
        name="set_light", description="Set the light in a room",
        properties={"room": ("string", "Room"), "level": ("integer", "Brightness from 0 to 100")},
        draw=lambda r: {"room": r.choice(words.ROOMS), "level": r.randint(0, 100)},
        asks=("Set the light in the {room} to {level}.", "Dim the {room} light to {level} percent.",
              "Turn the {room} light to {level}.", "Make the light in the {room} {level} percent."),
        pairs=("Set the light in the {a[room]} to {a[level]} and in the {b[room]} to {b[level]}.",),
        result=_done("The light in the {room} is at {level} percent now."),
    ),
    KnownTool(
        name="play_music", description="Play a song",
        properties={"song": ("string", "Title of the song")},
        draw=lambda r: {"song": r.choice(words.SONGS)},
        asks=("Play {song}.", 'Play the song "{song}".', "I want to hear {song}.",
              "Put on {song}, please.", "Can you play {song}?"),
        result=_done("Now playing {song}."),
    ),
    KnownTool(
        name="translate", description="Translate a text",
        properties={"text": ("string", "The text"), "language": ("string", "Target language")},
        draw=lambda r: {"text": sentence(r), "language": r.choice(words.LANGUAGES)},
        asks=('Translate "{text}" to {language}.', "Translate into {language}: {text}",
              'How do you say "{text}" in {language}?'),
    ),
    KnownTool(
        name="search_web", description="Search the web",
        properties={"query": ("string", "What to search for")},
        draw=lambda r: {"query": r.choice((
            f"{r.choice(words.ADJECTIVES)} {r.choice(words.EVERY_NOUN)}", r.choice(words.TOPICS),
            f"{r.choice(words.EVERY_NOUN)} {r.choice(words.CITIES)}"))},
        asks=("Search the web for {query}.", "Search for {query}.", "Look up {query} on the web.",
              "Find something about {query} online.", "Google {query}."),
    ),
    KnownTool(
        name="get_user", description="Look up a user by id",
        properties={"user_id": ("integer", "The id of the user")},
        draw=lambda r: {"user_id": r.randrange(100000)},
        asks=("Who is user {user_id}?", "Look up user {user_id}.", "Get the user with id {user_id}.",
              "Show me user {user_id}.", "Which user has the id {user_id}?"),
        pairs=("Look up the users {a[user_id]} and {b[user_id]}.",),
        result=_age,
    ),
    KnownTool(
        name="read_file", description="Read a text file",
        properties={"path": ("string", "Path of the file")},
        draw=lambda r: {"path": _path(r)},
        asks=("Read the file {path}.", "What is in {path}?", "Show me {path}.", "Open {path}.",
              "What does the file {path} say?"),
        result=_file,
    ),
    KnownTool(
        name="book_table", description="Book a table in a restaurant",
        properties={"restaurant": ("string", "Name"), "people": ("integer", "Number of guests"),
                    "time": ("string", "Time as HH:MM")},
        draw=lambda r: {"restaurant": f"The {r.choice(words.ADJECTIVES).capitalize()} "
                                      f"{r.choice(words.ANIMALS).capitalize()}",
                        "people": r.randint(1, 12),
                        "time": f"{r.randint(11, 22)}:{r.choice(('00', '15', '30', '45'))}"},
        asks=("Book a table for {people} at {restaurant} at {time}.",
              "Reserve a table at {restaurant} for {people} people at {time}.",
              "I need a table for {people} at {time} in {restaurant}."),
        result=_done("Your table for {people} at {restaurant} is booked for {time}."),
    ),
    KnownTool(
        name="create_event", description="Put an event into the calendar",
        properties={"title": ("string", "Title"), "day": ("string", "Day of the week"),
                    "time": ("string", "Time as HH:MM")},
        draw=lambda r: {"title": f"{r.choice(words.VERBS)} with {r.choice(words.NAMES)}",
                        "day": r.choice(words.DAYS), "time": f"{r.randint(8, 20):02d}:{r.choice(('00', '30'))}"},
        asks=('Add "{title}" to my calendar on {day} at {time}.',
              "Create an event {title} on {day} at {time}.",
              "Schedule {title} for {day} at {time}."),
        result=_done("{title} is in your calendar on {day} at {time}."),
    ),
)  # fmt: skip
