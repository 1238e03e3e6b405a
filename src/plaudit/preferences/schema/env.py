"""Alembic runs this: revisions are applied within the transaction of whoever asked for them."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
