"""Comparisons, and what was said of each as a whole."""

import sqlalchemy as sa
from alembic import op

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "comparisons",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False, unique=True),
        sa.Column("prompt", sa.Text, nullable=False),
        sa.Column("answers", sa.JSON, nullable=False),
        sa.Column("provenance", sa.JSON, nullable=False),
    )
    op.create_table(
        "preferences",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("comparison_id", sa.Integer, sa.ForeignKey("comparisons.id"), nullable=False, index=True),
        sa.Column("annotator", sa.String(200), nullable=False, index=True),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("shown", sa.JSON, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("created", sa.String(40), nullable=False),
    )
