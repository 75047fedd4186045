"""The one path of every dialect: a request is resolved once, rendered, generated, parsed and
counted here."""
