"""Builtin environments by name, and how any environment is loaded (`loading`) and played (`playing`)."""

BUILTINS = {
    "calculator": "marlaas.envs.tiny_tasks:Calculator",
    "guess-number": "marlaas.envs.guess_number:GuessNumber",
    "kuhn-poker": "marlaas.envs.kuhn_poker:KuhnPoker",
    "python-tool": "marlaas.envs.python_tool:PythonTool",
    "reasoning-gym": "marlaas.envs.reasoning:ReasoningGym",
    "relay": "marlaas.envs.team_tasks:Relay",
    "reverse": "marlaas.envs.tiny_tasks:Reverse",
    "solver-verifier": "marlaas.envs.solver_verifier:SolverVerifier",
    "tic-tac-toe": "marlaas.envs.tic_tac_toe:TicTacToe",
}
