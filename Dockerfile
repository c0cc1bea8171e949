# The scheduler, and an image to begin with for jobs: it has the packages of both, and the examples.
# Build it from the root of the repository: docker build -t registry.example/pipollux:0.1.0 .
FROM python:3.12-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1

RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin pipollux

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE CHANGELOG.md ./
COPY hybrid hybrid
COPY perfmodel perfmodel
COPY sched sched
COPY examples examples
RUN python -m pip install --constraint constraints.txt ".[demo,kubernetes,postgres]"

USER 10001
ENTRYPOINT ["pipollux"]
CMD ["--help"]
