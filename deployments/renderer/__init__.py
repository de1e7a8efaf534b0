"""The Renderer: HTTP and OpenAI's API in front, engine requests behind.

`serving.Renderer` turns a request into EngineRequests and their outputs into an answer; `routes.build_api` puts HTTP
around it. Plain Python: neither Ray nor torch is imported here; `deployments.app` wraps it into a Serve deployment.
"""
