"""Tool calls: what a request may ask (`plan`), how models write calls (`formats`), how they are read (`reader`).

plan.py    tools and tool_choice of a request, checked; the prompt and the grammar that follow from them
formats.py the three ways models write calls, and which of them a chat template teaches
reader.py  text as it is generated -> text, beginnings of calls, pieces of arguments
scan.py    JSON one character at a time
openai.py  those events in OpenAI's form
"""
