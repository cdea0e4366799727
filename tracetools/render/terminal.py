"""placeholder"""
def print_breakdown(r): print(r)
def print_diff(r): print(r)
def print_info(a,b): print(b)
