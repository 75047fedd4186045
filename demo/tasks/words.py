"""The closed vocabulary of the bundled model's world: names, things, places and a few facts.

Everything the generators say about the world is drawn from here, so that a model of ten million
parameters can know all of it. No code lives here, only data.
"""
# ruff: noqa: SIM905 - a word list reads best as text

NAMES = """Ada Bram Cleo Dario Edda Finn Greta Hugo Iris Jonas Kira Lena Mara Nils Olga Pavel Quinn Rosa
Sami Tobin Uma Viktor Wanda Xenia Yusuf Zoe Anna Ben Clara David Emma Felix Grace Henry Ines Jack Karin
Leo Maria Noah Oscar Paula Ruth Simon Tara Umar Vera Will Yara Zara Alice Bob Carol Dave Eve Frank Mia
Tom John Mary Peter Sara Lucy Max Nora Otto Alex Sam Kim Lisa Mark Julia Paul Lars Elena""".split()

ANIMALS = """fox mouse owl bear rabbit cat dog horse sheep goat duck frog wolf deer otter badger hedgehog
squirrel crow sparrow swan goose pig cow hen lion tiger elephant monkey turtle snail bee ant whale dolphin
dragon""".split()

FRUITS = """apple banana cherry date fig grape kiwi lemon mango melon nut olive orange papaya peach pear
plum quince raisin berry lime apricot coconut""".split()

COLORS = """red green blue yellow purple orange pink brown black white gray silver golden crimson violet
amber teal indigo""".split()

OBJECTS = """table chair lamp book pencil bottle window door wheel basket bucket candle clock coin drum
feather hammer jar kettle key ladder mirror needle paper pillow ring rope shoe spoon stone sword tower
umbrella wagon whistle bell boat box bread bridge broom cup flag flute garden glove hat house letter map
mill river road seed ship shovel star sun moon tree wall water wind cloud rain snow mountain valley forest
field lake island train car bicycle phone computer camera guitar piano violin ticket wallet bag blanket
engine server router keyboard screen button cable battery""".split()

ADJECTIVES = """brave calm clever cold crooked dusty early eager empty fast fierce gentle happy heavy hidden
hollow honest humble hungry kind late lazy little lonely loud lucky merry mild narrow noble old patient
plain polite proud quick quiet rapid rough round rusty sharp shiny short shy silent simple sleepy slow
small soft steady strange strong sunny sweet swift tall thin tiny warm wide wild wise young""".split()

VERBS = """walk run jump sing dance read write build open close carry bring find hide paint clean cook bake
draw drive fly grow hear help hold keep learn leave listen look make move open play pull push ride send
show sleep speak stand start stop swim take talk teach think throw turn visit wait wash watch work""".split()

CITIES = """Oslo Paris Rome Berlin Madrid London Tokyo Cairo Lima Quito Delhi Seoul Hanoi Athens Vienna
Prague Dublin Lisbon Warsaw Helsinki Stockholm Copenhagen Budapest Brussels Ottawa Havana Nairobi Boston
Chicago Sydney Toronto Zurich Munich Hamburg Geneva Kyoto Denver Seattle Dallas Austin Miami Bergen
Mumbai Shanghai Beijing Singapore Bangkok Istanbul Moscow Amsterdam""".split()

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo",
    "England": "London", "the United Kingdom": "London", "Japan": "Tokyo", "Egypt": "Cairo",
    "Peru": "Lima", "India": "New Delhi", "South Korea": "Seoul", "Greece": "Athens",
    "Austria": "Vienna", "Ireland": "Dublin", "Portugal": "Lisbon", "Poland": "Warsaw",
    "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Hungary": "Budapest",
    "Belgium": "Brussels", "Canada": "Ottawa", "Cuba": "Havana", "Kenya": "Nairobi",
    "China": "Beijing", "Russia": "Moscow", "Turkey": "Ankara", "Switzerland": "Bern",
    "the Netherlands": "Amsterdam", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Ecuador": "Quito",
    "Brazil": "Brasilia", "Australia": "Canberra", "Argentina": "Buenos Aires",
    "Mexico": "Mexico City", "the United States": "Washington, D.C.", "Iceland": "Reykjavik",
    "the Czech Republic": "Prague", "Chile": "Santiago", "Ukraine": "Kyiv",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "tall": "short", "fast": "slow", "old": "young", "happy": "sad",
    "light": "dark", "open": "closed", "full": "empty", "hard": "soft", "loud": "quiet",
    "strong": "weak", "early": "late", "wet": "dry", "rich": "poor", "high": "low", "up": "down",
    "left": "right", "day": "night", "good": "bad", "clean": "dirty", "near": "far",
    "wide": "narrow", "thick": "thin", "sweet": "sour", "true": "false", "yes": "no",
    "first": "last", "black": "white", "in": "out", "start": "stop", "win": "lose",
}  # fmt: skip

SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "owl": "hoot", "lion": "roar", "horse": "neigh", "frog": "croak", "mouse": "squeak",
    "bee": "buzz", "hen": "cluck", "wolf": "howl", "crow": "caw", "snake": "hiss",
}  # fmt: skip

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = """January February March April May June July August September October November
December""".split()

LANGUAGES = "French German Spanish Italian Japanese Korean Greek Polish Dutch Swedish Latin".split()
ROOMS = "kitchen bedroom bathroom hall garage office attic cellar garden library".split()
CURRENCIES = "USD EUR GBP JPY CHF NOK SEK CAD AUD INR".split()
STOCKS = "AAPL MSFT NVDA GOOG AMZN TSLA IBM INTC AMD META".split()
SONGS = """Blue River;Morning Light;The Mill Song;Silver Rain;Over the Hill;Little Star;Dancing Fox;
Winter Train;Golden Field;Paper Moon;Slow Water;Wild Heart""".replace("\n", "").split(";")
JOBS = """baker miller teacher doctor farmer sailor painter pilot nurse writer singer cook gardener
engineer carpenter tailor fisher shepherd""".split()
TOPICS = """quantum physics;the French revolution;machine learning;black holes;the stock market;chess
openings;ancient Rome;climate change;photosynthesis;the human heart;football;the Beatles;cooking pasta;
Kubernetes;databases;gardening;poetry;philosophy;evolution;electric cars;the moon landing;volcanoes;taxes;
dinosaurs;the Roman empire;Shakespeare;politics;religion;opera;the internet;cryptography;Linux;neural
networks;relativity;the weather;my health;the news;movies;history;geography;biology;chemistry;
mathematics;economics;art;sports;video games;travel;food;music;cars;space;robots""".replace(
    "\n", " "
).split(";")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNICODE = """café naïve über señor Zürich smörgåsbord façade jalapeño fiancée Ångström crème brûlée niño
piñata Łódź Kraków Øresund Æsir привет мир дом вода кошка солнце γεια κόσμος 你好 世界 水 山 東京 日本 猫
한국 서울 😀 🎉 🚀 🦊 🌊 ✨ ❤️ 🌍 👍 🐢 € £ ° ± × ÷ → ← ≤ ≥ “ ” ‘ ’ – — …""".split()

EVERY_NOUN = tuple(dict.fromkeys(ANIMALS + FRUITS + OBJECTS))
EVERY_WORD = tuple(dict.fromkeys(list(EVERY_NOUN) + COLORS + ADJECTIVES + VERBS))
