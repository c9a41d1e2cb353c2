"""The server: an OpenAI-compatible API in one process, the engine loop in another beside it, and a page.

browser, client ─► app (HTTP, templates, tools) ─► client ═ pipe ═► engine loop ─► Engine.step()
                             ▲                        │ deltas, snapshots
                          metrics, page ◄─────────────┘
"""
