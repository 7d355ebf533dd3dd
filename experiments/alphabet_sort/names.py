"""The names to sort: data only. Capitalized ASCII words, each once, in alphabetical order."""

from __future__ import annotations

_TEXT = """
Aaron Abigail Adam Adele Agnes Aidan Alan Albert Alice Alma Amber Amy Andrew Angela Anna Arthur
Barbara Beatrice Ben Bertha Betty Blake Bonnie Boris Brandon Brenda Brian Bruce Bruno
Caleb Calvin Carl Carmen Caroline Cecil Charles Chloe Claire Clara Colin Connor Cora Craig
Daisy Daniel Daphne David Dean Deborah Denise Dennis Diana Dominic Donald Doris Dorothy Dylan
Earl Edgar Edith Edward Eileen Elaine Eleanor Elijah Ella Elliot Emily Emma Eric Esther Ethan
Faith Felix Fiona Flora Florence Floyd Frances Frank Fred
Gabriel Gail Gary Gavin Gemma George Gerald Gilbert Gina Gloria Gordon Grace Greta Guy
Hannah Harold Harriet Harry Hazel Heather Hector Helen Henry Herbert Holly Howard Hugo
Ian Ida Ingrid Irene Iris Isaac Isabel Ivan Ivy
Jack Jacob Jade James Janet Jasmine Jason Jean Jesse Joan Joel John Joseph Joyce Judith Julia
Karen Karl Kate Keith Kelly Kenneth Kevin Kirsten Kurt Kyle
Lance Laura Lauren Leah Leo Leonard Lewis Liam Lily Linda Logan Louis Lucas Lucy Luke Lydia
Mabel Marcus Margaret Maria Mark Martha Martin Mary Matthew Max Megan Michael Miriam Mona Myra
Nadia Nancy Naomi Nathan Neil Nelson Nicholas Nigel Nina Noah Nora Norman
Olga Olive Oliver Olivia Omar Opal Oscar Otto Owen
Pamela Patrick Paul Paula Pearl Penny Peter Philip Phoebe Polly
Quentin Quincy Quinn
Rachel Ralph Raymond Rebecca Regina Rex Rhoda Richard Rita Robert Rodney Roger Rosa Roy Ruby
Ruth
Sadie Sally Samuel Sandra Sarah Scott Sean Seth Sharon Sheila Silas Simon Sophia Stella Steven
Susan
Tamara Tania Teresa Theodore Thomas Tina Toby Tracy Trevor Troy Tyler
Ulrich Una Ursula
Valerie Vanessa Vera Vernon Victor Vincent Viola Virginia Vivian
Wallace Walter Wanda Warren Wayne Wendy Wesley William Winston
Xavier Xenia
Yolanda Yusuf Yvonne
Zachary Zelda Zoe
"""

NAMES: tuple[str, ...] = tuple(_TEXT.split())
