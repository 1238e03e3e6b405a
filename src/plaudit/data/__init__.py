"""Prompts, demonstrations and preferences, from files of many kinds to one row type each."""
