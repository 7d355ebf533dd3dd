"""The names to sort: data only. Capitalized ASCII words, each once, in alphabetical order."""

from __future__ import annotations

_TEXT = """
Abigail Agnes Albert Amber Angela Barbara Bertha Bonnie Brenda Bruno Carl Cecil Claire Connor
Daisy David Denise Dominic Dorothy Edgar Eileen Elijah Emily Esther Felix Florence Frank Gail
Gemma Gilbert Gordon Guy Harriet Heather Henry Howard Ida Iris Ivan Jacob Janet Jean Joel Joyce
Karen Keith Kevin Kyle Lauren Leonard Lily Louis Luke Marcus Mark Mary Megan Mona Nancy Neil
Nigel Nora Olive Omar Otto Patrick Pearl Philip Quentin Rachel Rebecca Rhoda Robert Rosa Ruth
Samuel Scott Sharon Simon Steven Tania Thomas Tracy Tyler Ursula Vera Vincent Vivian Wanda Wendy
Winston Yolanda Zachary
"""

NAMES: tuple[str, ...] = tuple(_TEXT.split())
