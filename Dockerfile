# The server on Linux, on MLX's CPU back end; --build-arg BACKEND=cuda12 or cuda13 for NVIDIA GPUs (docker run --gpus all).
#
#   docker build -t mlx-flash .
#   docker run -p 8080:8080 -v mlx-flash:/data -e MLX_FLASH_API_KEY=secret mlx-flash --model qwen3-30b-a3b
#
# /data has downloaded models, prompts that are kept, and measured speeds. The budget is a share of the container's
# memory: give `docker run` a limit with -m, or --ram-budget-gb.
FROM python:3.12-slim

# MLX's CPU back end compiles kernels while it runs.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG BACKEND=cpu
COPY pyproject.toml README.md LICENSE /src/
COPY mlx_flash /src/mlx_flash
RUN pip install --no-cache-dir "/src[server,compress,$BACKEND]" && rm -rf /src

RUN useradd --create-home user && install --directory --owner user /data
USER user
ENV HF_HOME=/data/huggingface XDG_CACHE_HOME=/data/cache
VOLUME /data
EXPOSE 8080

# A model that has to be downloaded first takes its time.
HEALTHCHECK --start-period=10m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=5)"]
ENTRYPOINT ["mlx-flash", "serve", "--host", "0.0.0.0", "--port", "8080"]
