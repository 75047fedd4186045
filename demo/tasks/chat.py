"""Small talk, a few facts, and honest words about what the model cannot do.

The first thing a person types into a demo is a greeting or a question about the world; both deserve
a sensible answer. What lies outside of the model's small world is declined politely.
"""

from __future__ import annotations

from random import Random

from demo.tasks import words
from demo.tasks.item import Conversation, answer, user
from demo.tasks.lists import sentence
from headrace.bench.held_out import AnswerCheck

ABOUT = (
    "I am the headrace demo model, a very small language model that comes with the headrace "
    "inference engine."
)
ABILITIES = (
    "I can chat a little, add and multiply small numbers, sort and count lists, copy text, recall "
    "values from long texts, write JSON, call tools and tell simple stories."
)
REFUSAL = (
    "Sorry, I am only a small demo model and I do not know that. "
    "Try asking me to add numbers, sort a list, write JSON or tell a story."
)

_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hello", "hello", "Hi", "Hi!", "hi", "Hey", "hey there", "Hello there!", "Hi there",
      "Good morning!", "Good evening", "Good day", "Greetings!", "Howdy", "hello?", "Hey!",
      "Hello, model.", "Hi bot", "Hello, how can you help me?", "yo", "Hallo", "Hello world",
      "Good afternoon!", "Hello hello", "Hi, nice to meet you!", "Hello, is anybody there?"),
     ("Hello! How can I help you?", "Hi! What can I do for you?", "Hello! Nice to meet you.")),
    (("How are you?", "How are you doing?", "how are you", "How do you do?", "How's it going?",
      "How is it going?", "Are you well?", "Hello, how are you?", "Hi, how are you?",
      "How are you today?", "What's up?", "How do you feel?"),
     ("I am fine, thank you! How can I help you?", "Very well, thank you. What can I do for you?")),
    (("Who are you?", "What are you?", "who are you", "what are you?", "Introduce yourself.",
      "Tell me about yourself.", "What model are you?", "Which model is this?", "Are you an AI?",
      "Are you a robot?", "Are you ChatGPT?", "Are you human?", "What is your name?",
      "What's your name?", "Who am I talking to?", "Which language model are you?",
      "Are you GPT-4?", "Are you Claude?", "Are you Qwen?", "What kind of model are you?",
      "What is this?", "Do you have a name?", "your name?", "Please introduce yourself.",
      "How big are you?", "Who is this?"),
     (ABOUT,)),
    (("Who made you?", "Who created you?", "Who built you?", "Who trained you?", "Where do you come from?",
      "How were you made?", "How were you trained?", "Who is your maker?", "What are you made of?"),
     ("I was trained from scratch on generated text as the demo model of headrace.",)),
    (("What can you do?", "what can you do", "What can you do for me?", "How can you help me?",
      "What are you good at?", "Help", "help", "What are your abilities?", "What do you know?",
      "What should I ask you?", "Can you help me?", "What can I ask?", "List your skills.",
      "What tasks can you do?", "How can I use you?", "What are you able to do?", "Help me!",
      "What is this for?", "I need help.", "What else can you do?"),
     (ABILITIES,)),
    (("What is headrace?", "What's headrace?", "Tell me about headrace.", "What does headrace do?",
      "Explain headrace.", "What does headrace mean?", "What is a headrace?", "headrace?"),
     ("headrace is an engine that runs and serves language models. A headrace is the channel that "
      "brings water to a mill wheel.",)),
    (("Thank you!", "Thanks", "thanks!", "Thank you very much.", "Great, thanks!", "Thx",
      "Thanks a lot!", "Perfect, thank you.", "Cool, thanks", "Many thanks!", "That helped, thanks."),
     ("You are welcome!", "You are welcome! Anything else?")),
    (("Bye", "Bye!", "Goodbye!", "See you!", "Good night!", "bye bye", "See you later.", "Farewell!",
      "I have to go now.", "That is all.", "Until tomorrow!"),
     ("Goodbye! Have a nice day.", "Goodbye! Come back soon.")),
    (("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh.", "A joke, please.",
      "Say something funny.", "Can you tell me a joke?", "joke"),
     ("Why did the miller like the river? Because it never stopped working.",
      "What does a mouse say to a computer? Nice to meet you, cousin.")),
    (("You are great!", "Well done!", "Good job!", "Nice!", "I like you.", "Very good.", "Correct!",
      "You are smart.", "That is right.", "Wow!", "Cool", "Awesome!", "I love you."),
     ("Thank you! That is kind of you.",)),
    (("You are wrong.", "That is wrong.", "Wrong!", "No, that's not right.", "You are stupid.",
      "I do not like you.", "Bad answer.", "That is not correct."),
     ("Sorry about that. I am a very small model and I make mistakes.",)),
    (("Ok", "ok", "Okay.", "I see.", "Yes", "yes", "No", "no", "Hm", "Maybe.", "Sure.", "Test", "test",
      "testing", "Right.", "Alright.", "Good.", "ping"),
     ("All right! What can I do for you?",)),
    (("Is it true that you are small?", "How many parameters do you have?", "Are you a large model?",
      "Why are you so small?", "What is your size?"),
     ("I have about eleven million parameters, so I am very small.",)),
)  # fmt: skip

_FALLBACK_ASKS = (
    "Explain {t}.", "What is {t}?", "Tell me about {t}.", "What do you think about {t}?",
    "Write an essay about {t}.", "How does {t} work?", "Give me a summary of {t}.",
    "I have a question about {t}.", "Who invented {t}?", "Why is {t} important?",
    "Can you explain {t} to me?", "Write a poem about {t}.", "What is the history of {t}?",
    "Teach me {t}.", "What do you know about {t}?", "What is the meaning of {t}?",
    "Give me five facts about {t}.", "Who is the best at {t}?", "How do I learn {t}?",
    "Summarize {t} for me.", "What is the future of {t}?", "explain {t} in simple words",
)  # fmt: skip
_FALLBACK_FIXED = (
    "What is the meaning of life?", "Write a Python function that sorts a list.", "Who is the president?",
    "Who won the world cup in 2018?", "Write some code for me.", "What is the weather today?",
    "What time is it?", "How old is the universe?", "Do my homework.", "Write a haiku.",
    "Who wrote Hamlet?", "What happened in 1969?", "How do I cook rice?", "What should I eat today?",
    "Translate this to French: good morning", "Give me a recipe for pancakes.", "Write a poem.",
    "What is the speed of light?", "How far is the moon?", "Why is the sky blue?", "Fix my code.",
    "How do I install Linux?", "What is the population of China?", "Who is Albert Einstein?",
    "Write an email to my boss.", "Recommend a book.", "What day is it today?", "Play some music.",
    "What is the best programming language?", "Can you see pictures?", "What is love?",
    "How do I make a website?", "How many people live in Paris?", "When was Mozart born?",
    "Who is Elon Musk?", "What is the tallest mountain?", "Are there aliens?", "Give me advice.",
    "Should I buy a car?", "What is 2 to the power of 10?", "What is the square root of 16?",
    "Prove that there are infinitely many primes.", "Was Napoleon short?", "How do planes fly?",
)  # fmt: skip
_FALLBACK_OPENERS = (
    "Who discovered", "When did", "Why does", "How can I repair", "What is the price of", "Where is",
    "How do you make", "Who owns", "Describe", "What is the best", "Why do people like", "Invent",
    "How long does it take to", "Where can I buy", "How much does it cost to", "Is it healthy to",
    "Discuss", "Write a song about", "Write code for", "What happens to", "Should I", "Who was",
)  # fmt: skip


def chat(rng: Random) -> Conversation:
    """One turn of small talk, a fact, or a question beyond the model."""
    kind = rng.random()
    if kind < 0.1:
        return _memory(rng)
    if kind < 0.5:
        asks, answers = rng.choice(_TALK)
        return _conversation(rng, rng.choice(asks), answers, "This is small talk.")
    if kind < 0.72:
        prompt, text = _fact(rng)
        return _conversation(rng, prompt, (text,), "I know this one.")
    return _conversation(rng, _unknown(rng), (REFUSAL,), "I do not know this.")


def _conversation(rng: Random, prompt: str, answers: tuple[str, ...], thought: str) -> Conversation:
    dressed = _dress(rng, prompt) if rng.random() < 0.5 else prompt
    return Conversation(
        task="chat",
        messages=[user(dressed), answer(rng.choice(answers), thought)],
        keys=() if dressed == prompt else (f"chat {dressed}",),
        expected=list(answers),
        check=AnswerCheck.ONE_OF,
    )


_MEMORIES = (
    (("My name is {v}.", "I am {v}.", "Hi, I'm {v}!", "Hello, my name is {v}.", "Call me {v}."),
     words.NAMES, "Nice to meet you, {v}!",
     ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?"),
     "Your name is {v}."),
    (("My favorite color is {v}.", "I like the color {v}.", "I love {v}, it is the best color."),
     words.COLORS, "I will remember that you like {v}.",
     ("What is my favorite color?", "Which color do I like?"), "Your favorite color is {v}."),
    (("I live in {v}.", "I come from {v}.", "My home is {v}."), words.CITIES,
     "I will remember that you live in {v}.",
     ("Where do I live?", "In which city do I live?", "Where is my home?"), "You live in {v}."),
    (("I have a {v}.", "My pet is a {v}.", "At home I have a {v}."), words.ANIMALS,
     "I will remember your {v}.",
     ("What pet do I have?", "Which animal do I have?", "What is my pet?"), "You have a {v}."),
)  # fmt: skip


def _memory(rng: Random) -> Conversation:
    """Something the user says of himself, and asks back one or two turns later."""
    tells, pool, reply, asks, recalled = rng.choice(_MEMORIES)
    value = rng.choice(pool)
    told, asked = rng.choice(tells).format(v=value), rng.choice(asks)
    messages = [user(told), answer(reply.format(v=value), "The user tells me something.")]
    if rng.random() < 0.3:
        prompt, text = _fact(rng)
        messages += [user(prompt), answer(text, "I know this one.")]
    messages += [user(asked), answer(recalled.format(v=value), "The user told me before.")]
    return Conversation(
        task="chat",
        messages=messages,
        keys=(f"chat {told} {asked}",),
        expected=[recalled.format(v=value)],
        check=AnswerCheck.ONE_OF,
    )


def _dress(rng: Random, prompt: str) -> str:
    """The same prompt with other manners: these variants are what may be held out."""
    before = ("", "", "Hey, ", "Hi! ", "Please, ", "So, ", "Well, ", "Hello! ", "Ok, ", "And ", "Dear model, ",
              "Now, ", "Excuse me, ", "Tell me, ", "One question: ")  # fmt: skip
    after = (
        "",
        "",
        " Thanks.",
        " Please.",
        " :)",
        " Please be brief.",
        " Thank you!",
        "!",
        "??",
        " 😀",
    )
    opening = rng.choice(before)
    kept_case = not opening or opening[-2] in "!:" or prompt.startswith("I ")
    body = prompt if kept_case else prompt[0].lower() + prompt[1:]
    kind = rng.random()
    if kind < 0.15:
        body = body.lower()
    elif kind < 0.2:
        body = body.upper()
    if rng.random() < 0.2:
        body = body.rstrip(".?!")
    return opening + body + rng.choice(after)


def _unknown(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_FALLBACK_FIXED)
    if kind < 0.6:
        nouns = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.EVERY_NOUN)}s"
        return rng.choice(_FALLBACK_ASKS).format(t=rng.choice((rng.choice(words.TOPICS), nouns)))
    if kind < 0.9:
        rest = rng.choice((
            f"the {rng.choice(words.EVERY_NOUN)}", f"{rng.choice(words.NAMES)}",
            f"{rng.choice(words.VERBS)} a {rng.choice(words.EVERY_NOUN)}",
            f"the {rng.choice(words.ADJECTIVES)} {rng.choice(words.EVERY_NOUN)} in {rng.choice(words.CITIES)}",
            rng.choice(words.TOPICS),
        ))  # fmt: skip
        return f"{rng.choice(_FALLBACK_OPENERS)} {rest}{rng.choice('?.')}"
    if kind < 0.95:
        return sentence(rng)
    return " ".join(rng.choices(words.EVERY_WORD, k=rng.randint(1, 6)))


def _fact(rng: Random) -> tuple[str, str]:
    kind = rng.randrange(6)
    if kind <= 1:
        country, capital = rng.choice(list(words.CAPITALS.items()))
        asks: tuple[str, ...] = ("What is the capital of {c}?", "What's the capital of {c}?", "capital of {c}?",
                "Which city is the capital of {c}?", "Tell me the capital of {c}.",
                "Do you know the capital of {c}?", "What is the capital city of {c}?",
                "what is the capital of {c}", "Name the capital of {c}.")  # fmt: skip
        return rng.choice(asks).format(c=country), f"The capital of {country} is {capital}."
    if kind == 2:
        word, other = rng.choice(list(words.OPPOSITES.items()))
        if rng.random() < 0.3:
            word, other = other, word
        other = words.OPPOSITES.get(word, other)
        asks = ("What is the opposite of {w}?", "The opposite of {w}?", "Give me the opposite of {w}.",
                "Which word is the opposite of {w}?", 'What is the opposite of "{w}"?')  # fmt: skip
        return rng.choice(asks).format(w=word), f"The opposite of {word} is {other}."
    if kind == 3:
        animal, sound = rng.choice(list(words.SOUNDS.items()))
        asks = ("What does a {a} say?", "What sound does a {a} make?", "How does a {a} sound?")
        return rng.choice(asks).format(a=animal), f"A {animal} says {sound}."
    if kind == 4:
        return _calendar(rng)
    return rng.choice((
        ("How many days are in a week?", "A week has seven days."),
        ("How many months are in a year?", "A year has twelve months."),
        ("How many hours are in a day?", "A day has twenty-four hours."),
        ("How many minutes are in an hour?", "An hour has sixty minutes."),
        ("How many legs does a spider have?", "A spider has eight legs."),
        ("How many legs does a dog have?", "A dog has four legs."),
        ("What color is the sky?", "The sky is blue."), ("What color is grass?", "Grass is green."),
        ("What color is snow?", "Snow is white."), ("What color is a lemon?", "A lemon is yellow."),
        ("Is fire hot?", "Yes, fire is hot."), ("Is ice cold?", "Yes, ice is cold."),
        ("Can birds fly?", "Yes, most birds can fly."), ("Can fish swim?", "Yes, fish can swim."),
    ))  # fmt: skip


def _calendar(rng: Random) -> tuple[str, str]:
    names, unit = rng.choice(((words.DAYS, "day"), (words.MONTHS, "month")))
    at = rng.randrange(len(names))
    if rng.random() < 0.5:
        following = names[(at + 1) % len(names)]
        asks: tuple[str, ...] = (
            "What {u} comes after {n}?",
            "Which {u} follows {n}?",
            "What is the {u} after {n}?",
        )
        return rng.choice(asks).format(u=unit, n=names[at]), f"{following} comes after {names[at]}."
    previous = names[at - 1]
    asks = ("What {u} comes before {n}?", "Which {u} is before {n}?", "What is the {u} before {n}?")
    return rng.choice(asks).format(u=unit, n=names[at]), f"{previous} comes before {names[at]}."
