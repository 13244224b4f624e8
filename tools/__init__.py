# SPDX-License-Identifier: Apache-2.0
"""Development tools: tiny models and a runner for one real vLLM engine."""
