# shellcheck shell=sh
# What a user installs with pip, npm or pnpm lands here, without root.
case ":$PATH:" in
    *":$HOME/.local/bin:"*) ;;
    *) PATH="$HOME/.local/bin:$PATH" ;;
esac
export PATH LANG="${LANG:-C.UTF-8}"
