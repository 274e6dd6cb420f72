"""What a recipe trains on: text, mapped tokens, chats and streams, as batches that a resumed run finds again."""
