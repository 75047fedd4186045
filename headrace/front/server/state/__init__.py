"""What the server keeps between requests: stored responses, their events, and the secret that seals
what goes out."""
