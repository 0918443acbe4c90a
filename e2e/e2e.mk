# A real Kubernetes on this machine; see e2e/README.md. Included by the Makefile.
E2E := $(BIN)/python -m marlaas_e2e
E2E_ARGS ?=
CONTROL_PLANE_TOOLS := etcd kube-apiserver kubectl kube-controller-manager helm

.PHONY: e2e e2e-bytecode e2e-images e2e-tools control-plane-tools e2e-packages e2e-images-base e2e-up e2e-down

e2e: setup e2e-packages e2e-bytecode  ## Bring a real Kubernetes up on this machine (or use E2E_CONTEXT), run the scenario tests, take it down
	@chmod o+rx .  # a temporary clone may be closed to others; the pods' uid reads the Python environment in it
	$(BIN)/python -c "from marlaas_e2e.platform import build_platform; build_platform()"
	$(E2E) run $(BIN)/python -m pytest e2e/tests $(E2E_ARGS)

e2e-bytecode: setup  # pods cannot write bytecode into the environment that they mount
	@$(BIN)/python -m compileall -q operator workers .venv/lib/python3*/site-packages/mlflow
	@ls .venv/lib/python3*/site-packages/vllm/v1/engine/__pycache__/core.*.pyc > /dev/null 2>&1 \
	  || $(BIN)/python -W ignore -c "import vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, peft" 2> /dev/null

e2e-images: setup e2e-packages  ## Build the whole worker image once and start a pod from it
	$(BIN)/python -m marlaas_e2e.worker_image build
	$(E2E) run $(BIN)/python -m marlaas_e2e.worker_image start

e2e-tools: setup  ## Build Kubernetes, etcd, CoreDNS and helm into the cache (a quarter of an hour, once)
	$(E2E) tools

control-plane-tools: setup  ## Build what tests on a real API server need (ten minutes, once)
	@$(E2E) tools $(CONTROL_PLANE_TOOLS)

e2e-packages: setup  ## Install what a node and images need from Debian, if something is missing and this is root
	@$(E2E) packages

e2e-images-base: setup e2e-packages  ## Build the image that the others start from (a minute, once)
	$(BIN)/python -c "from marlaas_e2e import images; print(images.base_archive())"

e2e-up: setup e2e-packages  ## Bring the cluster up and leave it running; enter it with `python -m marlaas_e2e shell`
	$(E2E) up

e2e-down: setup  ## Take the cluster down
	$(E2E) down
