#!/usr/bin/env bash
# The three calls of a context's life, with curl. `make up` first; needs python3 to read one field of an answer.
set -euo pipefail
url=${CONTEXT_CACHE_URL:-http://127.0.0.1:8000} key=${CONTEXT_CACHE_API_KEY:-test-key-1234567890} model=smollm2-135m-instruct
call() { curl -sS -H "Authorization: Bearer $key" -H "Content-Type: application/json" "$@"; echo; }

created=$(call -X POST "$url/v1/context" -d '{"model": "'$model'", "prompt": "Say this is a test", "ttl": 3600}')
echo "$created"
session_id=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["session_id"])' <<<"$created")

# The same prompt again: one token is computed, the rest comes from the context.
call -X POST "$url/v1/completions" \
  -d '{"session_id": "'"$session_id"'", "model": "'$model'", "prompt": "Say this is a test"}'

# Only the new text: the conversation so far is the context's.
call -X POST "$url/v1/completions" \
  -d '{"session_id": "'"$session_id"'", "model": "'$model'", "prompt": " And now say it backwards:"}'

call -X DELETE "$url/v1/context/$session_id"
