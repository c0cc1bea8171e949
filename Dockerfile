# The scheduler, and an image to begin with for jobs: it has the packages of both, and the examples.
# Build it from the root of the repository: docker build -t registry.example/pipollux:0.1.0 .
# The base is pinned by version and digest; `docker buildx imagetools inspect` shows that of a newer one.
FROM python:3.12.13-slim-bookworm@sha256:4766d8b510c428e595d74b9cc5bbb2fae8e26316fffb4adc89908d79aacd58a2

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1

RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin pipollux

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY hybrid hybrid
COPY perfmodel perfmodel
COPY sched sched
COPY examples examples
RUN python -m pip install --constraint constraints.txt ".[demo,kubernetes,notify,postgres,push-pull,sched,sweep]"

USER 10001
ENTRYPOINT ["pipollux"]
CMD ["--help"]
