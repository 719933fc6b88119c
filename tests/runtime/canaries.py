"""Names of secrets, as files, flags and variables of other projects have them."""

from __future__ import annotations

SECRET = """
    api_key apiKey API_KEY apikey wandb_api_key WANDB_API_KEY comet-api-key openai.api_key api_keys
    key_api_key_2 access_key access_key_id secret_access_key AWS_SECRET_ACCESS_KEY secretKey
    private_key ssh_key encryption_key signing-key account_key AccountKey authtoken auth_token
    authToken token hf_token HF_TOKEN HUGGING_FACE_HUB_TOKEN access_token accessToken refresh_token
    session_token bearer_token github_token slack-token api_tokens password db_password dbPassword
    passwd pwd passphrase secret client_secret clientSecret secrets credential credentials
    authorization Authorization proxy_auth jwt session_cookie passwords dbPasswords passphrases
    userpassword NEPTUNE_APITOKEN wandbtoken botToken slack_bot_token authkeys
""".split()
