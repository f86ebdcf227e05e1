# The server for a CPU. For a GPU: --build-arg EXTRA=cuda and run with --gpus all (the driver comes from the host).
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN scripts/image.sh build /dist

FROM python:3.12-slim
ARG TORCH="torch==2.13.0"
ARG TORCH_INDEX=""
ARG EXTRA=""
COPY --from=build /dist /dist
COPY scripts/image.sh /usr/local/bin/sglite-image
RUN TORCH="$TORCH" TORCH_INDEX="$TORCH_INDEX" EXTRA="$EXTRA" sglite-image install /dist python
RUN useradd --create-home --uid 1000 sglite && mkdir /models && chown sglite /models
USER sglite
ENV SGLITE_HOME=/models
VOLUME /models
EXPOSE 30000
HEALTHCHECK --start-period=300s --interval=30s --timeout=15s \
  CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health/ready', timeout=10)"
# Loopback by default, like everywhere: publish with --host 0.0.0.0 and --api-key.
ENTRYPOINT ["sglite", "serve"]
CMD ["--model", "smollm2"]
