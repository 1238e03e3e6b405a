"""How the store's schema came to be, revision by revision, for Alembic."""
